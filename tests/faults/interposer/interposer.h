/* Stands between a process and the kernel: counts the system calls that change one directory, notes them with their
 * data, and strikes at one of them.
 *
 *     trap.c     a filter of the kernel hands every such call over
 *     calls.c    what each of them does to which path
 *     watch.c    whether a path counts; counting, striking, noting
 */
#ifndef INTERPOSER_H
#define INTERPOSER_H
#define _GNU_SOURCE
#include <limits.h>
#include <stddef.h>

/* The numbers are those of faults/calls.py. */
enum { OPEN = 1, CREATE, TRUNCATE, WRITE, SYNC, RENAME, LINK, SYMLINK, UNLINK, MKDIR, RMDIR, CLOSE, UNSEEN, FAILED };
enum { NONE, KILL_BEFORE, KILL_WITHIN, KILL_AFTER, FAIL, FAIL_FROM, SHORT };

/* -- trap.c -- */
long bare(long number, ...); /* a system call that the filter lets through; returns -errno */
long install(void);          /* returns 0, or what the kernel says against it */

/* -- calls.c -- */
long perform(long number, const long *a); /* a system call with its six arguments, as it is to happen */

/* -- watch.c -- */
int mine(int fd, char *path);                             /* does a descriptor lead to what counts? */
int resolve(int directory, const char *path, char *full); /* does a path? absolute and without dots in `full` */
long enter(int operation); /* count a call, lock until leave; the error that it is to fail with, negative, or 0 */
void leave(void);
void die(void);        /* as by SIGKILL */
int cuts_short(void);  /* whether the call that was entered is to write half */
int dies_within(void); /* whether the process ends then */
void note(int operation, const char *path, const char *other, long offset, const void *data, size_t size);

#endif
