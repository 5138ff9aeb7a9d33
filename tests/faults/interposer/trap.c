/* A seccomp filter turns every call that may change a file into a SIGSYS, unless it comes from `bare`; what is done
 * there puts the result where the caller expects it.
 *
 * So it does not matter which library calls, nor whether it goes through libc: the Rust of safetensors renames by an
 * instruction of its own, which LD_PRELOAD does not see. The filter stays until the process ends.
 */
#include "interposer.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>

#define CLONE_FILE 0x40049409 /* FICLONE */

extern __attribute__((visibility("hidden"))) char bare_returns[];
__asm__(".text\n.globl bare\n.hidden bare\n.type bare, @function\n"
        "bare: mov %rdi, %rax\n mov %rsi, %rdi\n mov %rdx, %rsi\n mov %rcx, %rdx\n mov %r8, %r10\n mov %r9, %r8\n"
        " mov 8(%rsp), %r9\n syscall\n"
        ".globl bare_returns\n.hidden bare_returns\nbare_returns: ret\n.size bare, .-bare\n");

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

#define LOAD_AT(offset) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset)
#define LOAD(field) LOAD_AT(offsetof(struct seccomp_data, field))
#define EQUAL(value, yes, no) (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(value), yes, no)
#define HAS(bit, yes, no) (struct sock_filter) BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bit, yes, no)
#define GIVE(verdict) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, verdict)
#define LOW_ARG(n) LOAD_AT(offsetof(struct seccomp_data, args[n]))

long install(void)
{
    uint64_t own = (uint64_t)bare_returns;
    struct sock_filter filter[NUM_TRAPPED + 24];
    int n = 0;
    filter[n++] = LOAD(arch);
    filter[n++] = EQUAL(AUDIT_ARCH_X86_64, 1, 0);
    filter[n++] = GIVE(SECCOMP_RET_ALLOW);
    filter[n++] = LOAD(instruction_pointer);
    filter[n++] = EQUAL(own, 0, 3);
    filter[n++] = LOAD_AT(offsetof(struct seccomp_data, instruction_pointer) + 4);
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
    filter[n++] = HAS(PROT_WRITE, 0, 2);
    filter[n++] = LOW_ARG(3);
    filter[n++] = HAS(MAP_SHARED, 1, 0);
    filter[n++] = GIVE(SECCOMP_RET_ALLOW);
    filter[n++] = GIVE(SECCOMP_RET_TRAP);
    struct sock_fprog program = {.len = n, .filter = filter};
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSYS, &action, NULL);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    return bare(SYS_seccomp, (long)SECCOMP_SET_MODE_FILTER, (long)SECCOMP_FILTER_FLAG_TSYNC, &program);
}
