/* Whether a path counts, and what is done with a call that does: counted, struck, noted. */
#include "interposer.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#define EXPORTED __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static volatile int armed;
static int log_fd = -1, fault, code, is_hit;
static long strike_at, num_calls;
static volatile long *fired;

/* Begin: strike at call number `at` (from 0, -1 for none) below the directory. `fired_` is set once it has struck.
 * Returns 0, or what the kernel says against it. */
EXPORTED long faults_arm(const char *directory, long at, int fault_, int code_, int log_fd_, long *fired_)
{
    static int is_installed;
    root_length = strlen(directory);
    memcpy(root, directory, root_length + 1);
    strike_at = at, fault = fault_, code = code_, log_fd = log_fd_, fired = fired_, num_calls = 0;
    long result = is_installed ? 0 : install();
    is_installed = result == 0;
    armed = is_installed;
    return result;
}

/* End: the number of calls that were counted. */
EXPORTED long faults_disarm(void)
{
    armed = 0;
    return num_calls;
}

/* -- which path ------------------------------------------------------------------------------------------------- */

static int below(const char *path)
{
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == 0);
}

static int read_link(const char *link, char *into)
{
    long length = bare(SYS_readlinkat, (long)AT_FDCWD, link, into, (long)PATH_MAX - 1, 0L, 0L);
    into[length > 0 ? length : 0] = 0;
    return length > 0;
}

static int path_of(int fd, char *into)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return read_link(link, into);
}

/* Whether a descriptor belongs to a file, or directory, below the root that still has a name. */
int mine(int fd, char *path)
{
    if (!armed || fd < 0 || !path_of(fd, path) || !below(path))
        return 0;
    size_t length = strlen(path);
    return length < 10 || strcmp(path + length - 10, " (deleted)") != 0;
}

/* Whether a path lies below the root; absolute and without dots in `full`. */
int resolve(int directory, const char *path, char *full)
{
    char joined[2 * PATH_MAX];
    full[0] = 0;
    if (!armed || !path || strlen(path) >= PATH_MAX)
        return 0;
    joined[0] = 0;
    if (path[0] != '/') {
        if (directory == AT_FDCWD)
            read_link("/proc/self/cwd", joined);
        else
            path_of(directory, joined);
        strcat(joined, "/");
    }
    strcat(joined, path);
    char *end = full;
    for (char *rest = joined, *part; (part = strtok_r(rest, "/", &rest));) {
        if (strcmp(part, ".") == 0)
            continue;
        if (strcmp(part, "..") == 0) {
            while (end > full && *--end != '/')
                ;
            *end = 0;
            continue;
        }
        if (end - full + strlen(part) + 2 > PATH_MAX)
            return 0;
        end += sprintf(end, "/%s", part);
    }
    return below(full);
}

/* -- counting, striking, noting --------------------------------------------------------------------------------- */

void die(void)
{
    bare(SYS_kill, bare(SYS_getpid), (long)SIGKILL);
    for (;;)
        bare(SYS_sched_yield);
}

/* Count a call. Returns the error that it is to fail with, negative, or 0. Holds the lock until `leave`. */
long enter(int operation)
{
    pthread_mutex_lock(&lock);
    long number = num_calls++;
    is_hit = number == strike_at && fault != NONE;
    int takes_space = operation <= WRITE || (operation >= RENAME && operation <= SYMLINK) || operation == MKDIR;
    int is_full = fault == FAIL_FROM && strike_at >= 0 && number >= strike_at && takes_space;
    if (fired && (fault == FAIL_FROM ? is_full : is_hit))
        *fired = 1;
    if (is_hit && fault == KILL_BEFORE)
        die();
    return (is_hit && fault == FAIL) || is_full ? -code : 0;
}

void leave(void)
{
    if (is_hit && fault == KILL_AFTER)
        die();
    pthread_mutex_unlock(&lock);
}

int cuts_short(void)
{
    return is_hit && (fault == KILL_WITHIN || fault == SHORT);
}

int dies_within(void)
{
    return is_hit && fault == KILL_WITHIN;
}

static void put_all(const void *data, size_t size)
{
    for (const char *at = data; size;) {
        long written = bare(SYS_write, (long)log_fd, at, size);
        if (written <= 0)
            die();
        at += written, size -= written;
    }
}

void note(int operation, const char *path, const char *other, long offset, const void *data, size_t size)
{
    if (log_fd < 0)
        return;
    int64_t head[5] = {operation, (int64_t)strlen(path), other ? (int64_t)strlen(other) : 0, offset, (int64_t)size};
    put_all(head, sizeof head);
    put_all(path, head[1]);
    put_all(other, head[2]);
    put_all(data, size);
}
