/* What every system call does, and to which path. */
#include "interposer.h"
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

/* A call that either happens as a whole or not, by the arguments it came with. */
static long whole(int operation, const char *path, const char *other, long offset, long number, const long *a)
{
    long result = enter(operation);
    if (!result)
        result = bare(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    note(result >= 0 ? operation : FAILED, path, other, offset, NULL, 0);
    leave();
    return result;
}

static long open_at(int directory, const char *path, int flags, long number, const long *a)
{
    char full[PATH_MAX];
    int changes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
    if (!changes || !resolve(directory, path, full))
        return bare(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    int operation = flags & O_TRUNC ? TRUNCATE : OPEN;
    if ((flags & O_TMPFILE) == O_TMPFILE)
        operation = UNSEEN;
    else if (bare(SYS_faccessat, (long)AT_FDCWD, full, (long)F_OK) != 0)
        operation = CREATE;
    return whole(operation, full, NULL, 0, number, a);
}

/* The system closes a descriptor even where it reports an error. */
static long close_one(int fd)
{
    char path[PATH_MAX];
    long flags = bare(SYS_fcntl, (long)fd, (long)F_GETFL, 0L);
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY || !mine(fd, path))
        return bare(SYS_close, (long)fd);
    long error = enter(CLOSE), result = bare(SYS_close, (long)fd);
    note(CLOSE, path, NULL, 0, NULL, 0);
    leave();
    return error ? error : result;
}

/* `at` is -1 where the descriptor's own place counts. */
static long put(int fd, const char *path, const char *data, size_t size, off_t at)
{
    long result = enter(WRITE), flags = bare(SYS_fcntl, (long)fd, (long)F_GETFL, 0L);
    struct stat status;
    off_t offset = at;
    if (at < 0 && flags & O_APPEND)
        offset = bare(SYS_fstat, (long)fd, &status) == 0 ? status.st_size : 0;
    else if (at < 0)
        offset = bare(SYS_lseek, (long)fd, 0L, (long)SEEK_CUR);
    if (cuts_short() && size > 1)
        size /= 2;
    if (!result)
        result = at < 0 ? bare(SYS_write, (long)fd, data, size) : bare(SYS_pwrite64, (long)fd, data, size, at);
    note(result > 0 ? WRITE : FAILED, path, NULL, offset, data, result > 0 ? result : 0);
    if (dies_within())
        die();
    leave();
    return result;
}

static long put_vector(int fd, const char *path, const struct iovec *parts, long num_parts, off_t at)
{
    size_t size = 0;
    for (long part = 0; part < num_parts; part++)
        size += parts[part].iov_len;
    long flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *data = (char *)bare(SYS_mmap, NULL, size + 1, (long)(PROT_READ | PROT_WRITE), flags, -1L, 0L), *end = data;
    for (long part = 0; part < num_parts; part++)
        end = mempcpy(end, parts[part].iov_base, parts[part].iov_len);
    long result = put(fd, path, data, size, at);
    bare(SYS_munmap, data, size + 1);
    return result;
}

static long content(long number, const long *a)
{
    char path[PATH_MAX];
    int fd = number == SYS_copy_file_range || number == SYS_splice ? a[2] : number == SYS_mmap ? a[4] : a[0];
    if (!mine(fd, path))
        return bare(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    switch (number) {
    case SYS_write:
        return put(fd, path, (char *)a[1], a[2], -1);
    case SYS_pwrite64:
        return put(fd, path, (char *)a[1], a[2], a[3]);
    case SYS_writev:
        return put_vector(fd, path, (struct iovec *)a[1], a[2], -1);
    case SYS_pwritev:
    case SYS_pwritev2:
        return put_vector(fd, path, (struct iovec *)a[1], a[2], a[3]);
    case SYS_ftruncate:
        return whole(TRUNCATE, path, NULL, a[1], number, a);
    case SYS_fsync:
    case SYS_fdatasync:
        return whole(SYNC, path, NULL, 0, number, a);
    }
    return whole(UNSEEN, path, NULL, 0, number, a); /* whoever reads the log refuses it */
}

static long two_paths(int from, const char *old, int to, const char *new, int operation, long number, const long *a)
{
    char full[PATH_MAX], other[PATH_MAX];
    int leaves = resolve(from, old, full), comes = resolve(to, new, other);
    if (!leaves && !comes)
        return bare(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return whole(leaves && comes ? operation : UNSEEN, full, other, 0, number, a);
}

static long one_path(int at, const char *path, int operation, const char *other, long offset, long number,
                     const long *a)
{
    char full[PATH_MAX];
    if (!resolve(at, path, full))
        return bare(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return whole(operation, full, other, offset, number, a);
}

#define PATH(n) ((const char *)a[n])
long perform(long number, const long *a)
{
    switch (number) {
    case SYS_open:
        return open_at(AT_FDCWD, PATH(0), a[1], number, a);
    case SYS_creat:
        return open_at(AT_FDCWD, PATH(0), O_CREAT | O_WRONLY | O_TRUNC, number, a);
    case SYS_openat:
        return open_at(a[0], PATH(1), a[2], number, a);
    case SYS_openat2:
        return open_at(a[0], PATH(1), *(uint64_t *)a[2], number, a);
    case SYS_close:
        return close_one(a[0]);
    case SYS_truncate:
        return one_path(AT_FDCWD, PATH(0), TRUNCATE, NULL, a[1], number, a);
    case SYS_rename:
        return two_paths(AT_FDCWD, PATH(0), AT_FDCWD, PATH(1), RENAME, number, a);
    case SYS_renameat:
    case SYS_renameat2:
        return two_paths(a[0], PATH(1), a[2], PATH(3), RENAME, number, a);
    case SYS_link:
        return two_paths(AT_FDCWD, PATH(0), AT_FDCWD, PATH(1), LINK, number, a);
    case SYS_linkat:
        return two_paths(a[0], PATH(1), a[2], PATH(3), LINK, number, a);
    case SYS_symlink:
        return one_path(AT_FDCWD, PATH(1), SYMLINK, PATH(0), 0, number, a);
    case SYS_symlinkat:
        return one_path(a[1], PATH(2), SYMLINK, PATH(0), 0, number, a);
    case SYS_unlink:
        return one_path(AT_FDCWD, PATH(0), UNLINK, NULL, 0, number, a);
    case SYS_rmdir:
        return one_path(AT_FDCWD, PATH(0), RMDIR, NULL, 0, number, a);
    case SYS_unlinkat:
        return one_path(a[0], PATH(1), a[2] & AT_REMOVEDIR ? RMDIR : UNLINK, NULL, 0, number, a);
    case SYS_mkdir:
        return one_path(AT_FDCWD, PATH(0), MKDIR, NULL, 0, number, a);
    case SYS_mkdirat:
        return one_path(a[0], PATH(1), MKDIR, NULL, 0, number, a);
    }
    return content(number, a);
}
