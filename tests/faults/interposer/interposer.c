/* Stands between a process and the kernel: counts the system calls that change one directory, notes them with their
 * data, and strikes at one of them.
 *
 * A seccomp filter turns every such call into a SIGSYS, unless it comes from `bare` below; the handler does what is to
 * be done and puts the result where the caller expects it. So it does not matter which library calls, nor whether it
 * goes through libc: the Rust of safetensors renames by an instruction of its own, which LD_PRELOAD does not see.
 * Which file a descriptor belongs to is asked of /proc, whoever opened it. The filter stays until the process ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>

/* The numbers are those of faults/calls.py. */
enum { OPEN = 1, CREATE, TRUNCATE, WRITE, SYNC, RENAME, LINK, SYMLINK, UNLINK, MKDIR, RMDIR, CLOSE, UNSEEN, FAILED };
enum { NONE, KILL_BEFORE, KILL_WITHIN, KILL_AFTER, FAIL, FAIL_FROM, SHORT };

#define CLONE_FILE 0x40049409 /* FICLONE */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static volatile int armed;
static int log_fd = -1, fault, code, is_hit;
static long strike_at, num_calls;
static volatile long *fired;

/* A system call that the filter lets through; returns -errno. */
long bare(long number, ...);
extern char bare_returns[];
__asm__(".text\n.globl bare\n.type bare, @function\n"
        "bare: mov %rdi, %rax\n mov %rsi, %rdi\n mov %rdx, %rsi\n mov %rcx, %rdx\n mov %r8, %r10\n mov %r9, %r8\n"
        " mov 8(%rsp), %r9\n syscall\n"
        ".globl bare_returns\nbare_returns: ret\n.size bare, .-bare\n");

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
static int mine(int fd, char *path)
{
    if (!armed || fd < 0 || !path_of(fd, path) || !below(path))
        return 0;
    size_t length = strlen(path);
    return length < 10 || strcmp(path + length - 10, " (deleted)") != 0;
}

/* Whether a path lies below the root; absolute and without dots in `full`. */
static int resolve(int directory, const char *path, char *full)
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

static void die(void)
{
    bare(SYS_kill, bare(SYS_getpid), (long)SIGKILL);
    for (;;)
        bare(SYS_sched_yield);
}

/* Count a call. Returns the error that it is to fail with, negative, or 0. Holds the lock until `leave`. */
static long enter(int operation)
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

static void leave(void)
{
    if (is_hit && fault == KILL_AFTER)
        die();
    pthread_mutex_unlock(&lock);
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

static void note(int operation, const char *path, const char *other, long offset, const void *data, size_t size)
{
    if (log_fd < 0)
        return;
    int64_t head[5] = {operation, (int64_t)strlen(path), other ? (int64_t)strlen(other) : 0, offset, (int64_t)size};
    put_all(head, sizeof head);
    put_all(path, head[1]);
    put_all(other, head[2]);
    put_all(data, size);
}

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

/* -- the calls -------------------------------------------------------------------------------------------------- */

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
    if (is_hit && (fault == KILL_WITHIN || fault == SHORT) && size > 1)
        size /= 2;
    if (!result)
        result = at < 0 ? bare(SYS_write, (long)fd, data, size) : bare(SYS_pwrite64, (long)fd, data, size, at);
    note(result > 0 ? WRITE : FAILED, path, NULL, offset, data, result > 0 ? result : 0);
    if (is_hit && fault == KILL_WITHIN)
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

static long one_path(int at, const char *path, int operation, const char *other, long offset, long number, const long *a)
{
    char full[PATH_MAX];
    if (!resolve(at, path, full))
        return bare(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return whole(operation, full, other, offset, number, a);
}

#define PATH(n) ((const char *)a[n])
static long perform(long number, const long *a)
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

/* -- the filter ------------------------------------------------------------------------------------------------- */

static const int TRAPPED[] = {
    SYS_open, SYS_creat, SYS_openat, SYS_openat2, SYS_close, SYS_truncate, SYS_rename, SYS_renameat, SYS_renameat2,
    SYS_link, SYS_linkat, SYS_symlink, SYS_symlinkat, SYS_unlink, SYS_rmdir, SYS_unlinkat, SYS_mkdir, SYS_mkdirat,
    SYS_write, SYS_pwrite64, SYS_writev, SYS_pwritev, SYS_pwritev2, SYS_ftruncate, SYS_fsync, SYS_fdatasync,
    SYS_fallocate, SYS_syncfs, SYS_sync_file_range, SYS_sendfile, SYS_copy_file_range, SYS_splice,
};
#define NUM_TRAPPED (sizeof TRAPPED / sizeof TRAPPED[0])

static void on_trap(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    long a[6] = {registers[REG_RDI], registers[REG_RSI], registers[REG_RDX],
                 registers[REG_R10], registers[REG_R8],  registers[REG_R9]};
    registers[REG_RAX] = perform(registers[REG_RAX], a);
}

#define LOAD(field) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define EQUAL(value, yes, no) (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(value), yes, no)
#define GIVE(verdict) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, verdict)
#define LOW_ARG(n) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[n]))

static long install(void)
{
    uint64_t own = (uint64_t)bare_returns;
    struct sock_filter filter[NUM_TRAPPED + 24];
    int n = 0;
    filter[n++] = LOAD(arch);
    filter[n++] = EQUAL(AUDIT_ARCH_X86_64, 1, 0);
    filter[n++] = GIVE(SECCOMP_RET_ALLOW);
    filter[n++] = LOAD(instruction_pointer);
    filter[n++] = EQUAL(own, 0, 3);
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4);
    filter[n++] = EQUAL(own >> 32, 0, 1);
    filter[n++] = GIVE(SECCOMP_RET_ALLOW);
    filter[n++] = LOAD(nr);
    for (size_t number = 0; number < NUM_TRAPPED; number++)
        filter[n++] = EQUAL(TRAPPED[number], NUM_TRAPPED - number + 8, 0);
    filter[n++] = EQUAL(SYS_ioctl, 0, 2);
    filter[n++] = LOW_ARG(1);
    filter[n++] = EQUAL(CLONE_FILE, 6, 5);
    filter[n++] = EQUAL(SYS_mmap, 0, 4);
    filter[n++] = LOW_ARG(2);
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_WRITE, 0, 2);
    filter[n++] = LOW_ARG(3);
    filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, MAP_SHARED, 1, 0);
    filter[n++] = GIVE(SECCOMP_RET_ALLOW);
    filter[n++] = GIVE(SECCOMP_RET_TRAP);
    struct sock_fprog program = {.len = n, .filter = filter};
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSYS, &action, NULL);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return bare(SYS_seccomp, (long)SECCOMP_SET_MODE_FILTER, (long)SECCOMP_FILTER_FLAG_TSYNC, &program);
}

/* Begin: strike at call number `at` (from 0, -1 for none) below the directory. `fired_` is set once it has struck.
 * Returns 0, or what the kernel says against it. */
long faults_arm(const char *directory, long at, int fault_, int code_, int log_fd_, long *fired_)
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
long faults_disarm(void)
{
    armed = 0;
    return num_calls;
}
