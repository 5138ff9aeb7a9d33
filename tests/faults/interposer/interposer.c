/* Stands between a program and the file calls of libc: counts those that change one directory, notes them with their
 * data, and strikes at one of them. Loaded with LD_PRELOAD; does nothing until faults_arm is called.
 *
 * Calls go on as bare system calls, so nothing here passes through here again. Which file a descriptor belongs to is
 * asked of /proc, so it does not matter who opened it, and how.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The numbers are those of faults/calls.py. */
enum { OPEN = 1, CREATE, TRUNCATE, WRITE, SYNC, RENAME, LINK, SYMLINK, UNLINK, MKDIR, RMDIR, CLOSE, UNSEEN, FAILED };
enum { NONE, KILL_BEFORE, KILL_WITHIN, KILL_AFTER, FAIL, FAIL_FROM, SHORT };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static volatile int armed;
static int log_fd = -1, fault, code, is_hit;
static long strike_at, num_calls;
static volatile long *fired;

/* Begin: strike at call number `at` (from 0, -1 for none) below the directory. `fired_` is set once it has struck. */
void faults_arm(const char *directory, long at, int fault_, int code_, int log_fd_, long *fired_)
{
    root_length = strlen(directory);
    memcpy(root, directory, root_length + 1);
    strike_at = at, fault = fault_, code = code_, log_fd = log_fd_, fired = fired_, num_calls = 0;
    armed = 1;
}

/* End: the number of calls that were counted. */
long faults_disarm(void)
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
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, into, PATH_MAX - 1);
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
static int mine(int fd, char *path)
{
    if (!armed || fd < 0)
        return 0;
    int saved = errno;
    int found = path_of(fd, path) && below(path);
    if (found) {
        size_t length = strlen(path);
        found = length < 10 || strcmp(path + length - 10, " (deleted)") != 0;
    }
    errno = saved;
    return found;
}

/* Whether a path lies below the root; absolute and without dots in `full`. */
static int resolve(int directory, const char *path, char *full)
{
    static __thread char joined[2 * PATH_MAX];
    if (!armed || !path || strlen(path) >= PATH_MAX)
        return 0;
    int saved = errno;
    joined[0] = 0;
    if (path[0] != '/') {
        if (directory == AT_FDCWD)
            read_link("/proc/self/cwd", joined);
        else
            path_of(directory, joined);
        strcat(joined, "/");
    }
    strcat(joined, path);
    errno = saved;
    char *end = full;
    *end = 0;
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

static void die(void)
{
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;)
        syscall(SYS_sched_yield);
}

/* Count a call. Returns the error that it is to fail with, or 0. Holds the lock until `leave`. */
static int enter(int operation)
{
    pthread_mutex_lock(&lock);
    long number = num_calls++;
    is_hit = number == strike_at && fault != NONE;
    if (is_hit && fired)
        *fired = 1;
    if (is_hit && fault == KILL_BEFORE)
        die();
    int takes_space = operation <= WRITE || (operation >= RENAME && operation <= SYMLINK) || operation == MKDIR;
    int fails_on = fault == FAIL_FROM && strike_at >= 0 && number >= strike_at && takes_space;
    if (fails_on && fired)
        *fired = 1;
    return (is_hit && fault == FAIL) || fails_on ? code : 0;
}

static void leave(void)
{
    if (is_hit && fault == KILL_AFTER)
        die();
    pthread_mutex_unlock(&lock);
}

static void put_all(const void *data, size_t size)
{
    for (const char *at = data; size;) {
        long written = syscall(SYS_write, log_fd, at, size);
        if (written <= 0)
            abort();
        at += written, size -= written;
    }
}

static void note(int operation, const char *path, const char *other, long offset, const void *data, size_t size)
{
    if (log_fd < 0)
        return;
    int saved = errno;
    int64_t head[5] = {operation, (int64_t)strlen(path), other ? (int64_t)strlen(other) : 0, offset, (int64_t)size};
    put_all(head, sizeof head);
    put_all(path, head[1]);
    put_all(other, head[2]);
    put_all(data, size);
    errno = saved;
}

static long refuse(int error)
{
    errno = error;
    return -1;
}

/* A call that either happens as a whole or not. */
#define WHOLE(operation, path, other, offset, call)                                                                    \
    do {                                                                                                               \
        int error = enter(operation);                                                                                  \
        long result = error ? refuse(error) : (long)(call);                                                            \
        note(result >= 0 ? operation : FAILED, path, other, offset, NULL, 0);                                          \
        leave();                                                                                                       \
        return result;                                                                                                 \
    } while (0)

/* -- opening and closing ---------------------------------------------------------------------------------------- */

static int opening(const char *full, int flags)
{
    if (syscall(SYS_faccessat, AT_FDCWD, full, F_OK) != 0)
        return CREATE;
    return flags & O_TRUNC ? TRUNCATE : OPEN;
}

static int changes(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
}

static int open_at(int directory, const char *path, int flags, mode_t mode)
{
    char full[PATH_MAX];
    if (!resolve(directory, path, full) || !changes(flags))
        return syscall(SYS_openat, directory, path, flags, mode);
    int saved = errno, operation = (flags & O_TMPFILE) == O_TMPFILE ? UNSEEN : opening(full, flags);
    errno = saved;
    WHOLE(operation, full, NULL, 0, syscall(SYS_openat, directory, path, flags, mode));
}

#define MODE                                                                                                           \
    mode_t mode = 0;                                                                                                   \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                                         \
        va_list args;                                                                                                  \
        va_start(args, flags);                                                                                         \
        mode = va_arg(args, mode_t);                                                                                   \
        va_end(args);                                                                                                  \
    }
int open(const char *path, int flags, ...) { MODE return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_at(AT_FDCWD, path, flags, mode); }
int openat(int directory, const char *path, int flags, ...) { MODE return open_at(directory, path, flags, mode); }
int openat64(int directory, const char *path, int flags, ...) { MODE return open_at(directory, path, flags, mode); }
int __open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __openat_2(int directory, const char *path, int flags) { return open_at(directory, path, flags, 0); }
int __openat64_2(int directory, const char *path, int flags) { return open_at(directory, path, flags, 0); }
int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

typedef FILE *(*opener)(const char *, const char *);

/* C++ streams open their files in this way, then write to the descriptor. */
static FILE *open_stream(const char *name, const char *path, const char *mode)
{
    opener real = (opener)dlsym(RTLD_NEXT, name);
    char full[PATH_MAX];
    if ((mode[0] == 'r' && !strchr(mode, '+')) || !resolve(AT_FDCWD, path, full))
        return real(path, mode);
    int saved = errno, operation = opening(full, mode[0] == 'w' ? O_TRUNC : 0);
    errno = saved;
    int error = enter(operation);
    FILE *stream = error ? NULL : real(path, mode);
    if (error)
        errno = error;
    note(stream ? operation : FAILED, full, NULL, 0, NULL, 0);
    leave();
    return stream;
}

FILE *fopen(const char *path, const char *mode) { return open_stream("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return open_stream("fopen64", path, mode); }

static int closes_written(int fd, char *path)
{
    if (!mine(fd, path))
        return 0;
    int flags = syscall(SYS_fcntl, fd, F_GETFL);
    return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

/* The system closes a descriptor even where it reports an error. */
int close(int fd)
{
    char path[PATH_MAX];
    if (!closes_written(fd, path))
        return syscall(SYS_close, fd);
    int error = enter(CLOSE);
    long result = syscall(SYS_close, fd);
    note(CLOSE, path, NULL, 0, NULL, 0);
    leave();
    return error ? refuse(error) : result;
}

int fclose(FILE *stream)
{
    int (*real)(FILE *) = (int (*)(FILE *))dlsym(RTLD_NEXT, "fclose");
    char path[PATH_MAX];
    if (!armed || !closes_written(fileno(stream), path))
        return real(stream);
    int error = enter(CLOSE);
    int result = real(stream);
    note(CLOSE, path, NULL, 0, NULL, 0);
    leave();
    return error ? refuse(error) : result;
}

/* -- content ---------------------------------------------------------------------------------------------------- */

static ssize_t put(int fd, const char *path, const char *data, size_t size, off_t at)
{
    int error = enter(WRITE);
    int flags = syscall(SYS_fcntl, fd, F_GETFL);
    struct stat status;
    off_t offset = at;
    if (at < 0)
        offset = flags & O_APPEND && fstat(fd, &status) == 0 ? status.st_size : syscall(SYS_lseek, fd, 0, SEEK_CUR);
    int is_cut = is_hit && (fault == KILL_WITHIN || fault == SHORT) && size > 1;
    if (is_cut)
        size /= 2;
    ssize_t result = -1;
    if (error)
        errno = error;
    else
        result = at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
    note(result > 0 ? WRITE : FAILED, path, NULL, offset, data, result > 0 ? result : 0);
    if (is_hit && fault == KILL_WITHIN)
        die();
    leave();
    return result;
}

static ssize_t put_vector(int fd, const char *path, const struct iovec *parts, int num_parts, off_t at)
{
    size_t size = 0;
    for (int part = 0; part < num_parts; part++)
        size += parts[part].iov_len;
    char *data = malloc(size + 1), *end = data;
    for (int part = 0; part < num_parts; part++)
        end = mempcpy(end, parts[part].iov_base, parts[part].iov_len);
    ssize_t result = put(fd, path, data, size, at);
    int saved = errno;
    free(data);
    errno = saved;
    return result;
}

#define PASS(...)                                                                                                      \
    char path[PATH_MAX];                                                                                               \
    if (!mine(fd, path))                                                                                               \
        return syscall(__VA_ARGS__);
ssize_t write(int fd, const void *data, size_t size) { PASS(SYS_write, fd, data, size) return put(fd, path, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    PASS(SYS_pwrite64, fd, data, size, at)
    return put(fd, path, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return pwrite(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int n)
{
    PASS(SYS_writev, fd, parts, n)
    return put_vector(fd, path, parts, n, -1);
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at)
{
    PASS(SYS_pwritev, fd, parts, n, at, 0)
    return put_vector(fd, path, parts, n, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off_t at) { return pwritev(fd, parts, n, at); }
ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    PASS(SYS_pwritev2, fd, parts, n, at, 0, flags)
    return put_vector(fd, path, parts, n, at);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    return pwritev2(fd, parts, n, at, flags);
}

int ftruncate(int fd, off_t size)
{
    PASS(SYS_ftruncate, fd, size)
    WHOLE(TRUNCATE, path, NULL, size, syscall(SYS_ftruncate, fd, size));
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *name, off_t size)
{
    char full[PATH_MAX];
    if (!resolve(AT_FDCWD, name, full))
        return syscall(SYS_truncate, name, size);
    WHOLE(TRUNCATE, full, NULL, size, syscall(SYS_truncate, name, size));
}
int truncate64(const char *name, off_t size) { return truncate(name, size); }

/* Ways to change content that the log does not describe: noted, so that whoever reads it refuses it. */
int fallocate(int fd, int mode, off_t begin, off_t size)
{
    PASS(SYS_fallocate, fd, mode, begin, size)
    WHOLE(UNSEEN, path, NULL, 0, syscall(SYS_fallocate, fd, mode, begin, size));
}
int fallocate64(int fd, int mode, off_t begin, off_t size) { return fallocate(fd, mode, begin, size); }
int posix_fallocate(int fd, off_t begin, off_t size) { return fallocate(fd, 0, begin, size) ? errno : 0; }
int posix_fallocate64(int fd, off_t begin, off_t size) { return posix_fallocate(fd, begin, size); }
ssize_t sendfile(int fd, int from, off_t *at, size_t size)
{
    PASS(SYS_sendfile, fd, from, at, size)
    WHOLE(UNSEEN, path, NULL, 0, syscall(SYS_sendfile, fd, from, at, size));
}
ssize_t sendfile64(int fd, int from, off_t *at, size_t size) { return sendfile(fd, from, at, size); }
ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t size, unsigned flags)
{
    PASS(SYS_copy_file_range, from, at, fd, to, size, flags)
    WHOLE(UNSEEN, path, NULL, 0, syscall(SYS_copy_file_range, from, at, fd, to, size, flags));
}
int ioctl(int fd, unsigned long request, ...)
{
    va_list args;
    va_start(args, request);
    void *arg = va_arg(args, void *);
    va_end(args);
    if (request != 0x40049409) /* FICLONE */
        return syscall(SYS_ioctl, fd, request, arg);
    PASS(SYS_ioctl, fd, request, arg)
    WHOLE(UNSEEN, path, NULL, 0, syscall(SYS_ioctl, fd, request, arg));
}
void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t at)
{
    char path[PATH_MAX];
    if ((flags & MAP_TYPE) != MAP_PRIVATE && protection & PROT_WRITE && !(flags & MAP_ANONYMOUS) && mine(fd, path)) {
        enter(UNSEEN);
        note(UNSEEN, path, NULL, 0, NULL, 0);
        leave();
    }
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, at);
}
void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t at)
{
    return mmap(address, size, protection, flags, fd, at);
}

int fsync(int fd)
{
    PASS(SYS_fsync, fd)
    WHOLE(SYNC, path, NULL, 0, syscall(SYS_fsync, fd));
}
int fdatasync(int fd)
{
    PASS(SYS_fdatasync, fd)
    WHOLE(SYNC, path, NULL, 0, syscall(SYS_fdatasync, fd));
}
int syncfs(int fd)
{
    PASS(SYS_syncfs, fd)
    WHOLE(UNSEEN, path, NULL, 0, syscall(SYS_syncfs, fd));
}

/* -- names ------------------------------------------------------------------------------------------------------ */

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    char full[PATH_MAX], other[PATH_MAX];
    int leaves = resolve(from, old, full), comes = resolve(to, new, other);
    if (!leaves && !comes)
        return syscall(SYS_renameat2, from, old, to, new, flags);
    WHOLE(leaves && comes ? RENAME : UNSEEN, full, other, 0, syscall(SYS_renameat2, from, old, to, new, flags));
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int linkat(int from, const char *old, int to, const char *new, int flags)
{
    char full[PATH_MAX], other[PATH_MAX];
    if (!resolve(to, new, other))
        return syscall(SYS_linkat, from, old, to, new, flags);
    int leaves = resolve(from, old, full);
    WHOLE(leaves ? LINK : UNSEEN, full, other, 0, syscall(SYS_linkat, from, old, to, new, flags));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int symlinkat(const char *target, int directory, const char *path)
{
    char full[PATH_MAX];
    if (!resolve(directory, path, full))
        return syscall(SYS_symlinkat, target, directory, path);
    WHOLE(SYMLINK, full, target, 0, syscall(SYS_symlinkat, target, directory, path));
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

int unlinkat(int directory, const char *path, int flags)
{
    char full[PATH_MAX];
    if (!resolve(directory, path, full))
        return syscall(SYS_unlinkat, directory, path, flags);
    WHOLE(flags & AT_REMOVEDIR ? RMDIR : UNLINK, full, NULL, 0, syscall(SYS_unlinkat, directory, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path)
{
    int result = unlinkat(AT_FDCWD, path, 0);
    return result && errno == EISDIR ? unlinkat(AT_FDCWD, path, AT_REMOVEDIR) : result;
}

int mkdirat(int directory, const char *path, mode_t mode)
{
    char full[PATH_MAX];
    if (!resolve(directory, path, full))
        return syscall(SYS_mkdirat, directory, path, mode);
    WHOLE(MKDIR, full, NULL, 0, syscall(SYS_mkdirat, directory, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
