/* System calls that change files, as a library to preload: each is written down, and one of them fails or ends the process.

   Loaded with LD_PRELOAD it does nothing until `arm` is called, and then sees only files below one folder. A call is known by its name,
   the path below that folder (the process's own number in it replaced by #) and how often it has come, which is the same in every run of one
   program however its threads take turns. Linux and glibc: these are the names that Python, libstdc++ and mlx call. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { NOTHING, FAIL, SHORT, KILL_BEFORE, KILL_AFTER, FULL };

static char root[4096], target_call[32], target_path[4096];
static size_t root_length;
static int armed_process, trace = -1, action, error_number, occurrence;
static atomic_int seen, is_full;

/* From now on calls below `folder` are written to the descriptor `trace_to` (−1: to none), and occurrence number `which`, counted from 1, of
   call `name` on `path` is answered by `what`. FULL: that one and every later one that needs room fail with `error`. */
void arm(const char *folder, int trace_to, const char *name, const char *path, int which, int what, int error)
{
    snprintf(root, sizeof root, "%s/", folder);
    root_length = strlen(root);
    snprintf(target_call, sizeof target_call, "%s", name);
    snprintf(target_path, sizeof target_path, "%s", path);
    trace = trace_to, occurrence = which, action = what, error_number = error;
    armed_process = getpid();
}

/* The path below the folder, in `short_path`; 0 where it lies elsewhere. */
static int below(const char *path, char *short_path)
{
    char number[16];
    size_t length = snprintf(number, sizeof number, "%d", armed_process);
    if (strncmp(path, root, root_length))
        return 0;
    path += root_length;
    char *end = short_path + 4000;
    while (*path && short_path < end) {
        if (!strncmp(path, number, length)) {
            *short_path++ = '#';
            path += length;
        } else
            *short_path++ = *path++;
    }
    *short_path = 0;
    return 1;
}

static int absolute(int folder, const char *path, char *full)
{
    if (*path == '/')
        return snprintf(full, 4096, "%s", path) > 0;
    char link[64], base[4096];
    if (folder == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, base, sizeof base - 1);
    if (length < 0)
        return 0;
    base[length] = 0;
    return snprintf(full, 4096, "%.2000s/%.2000s", base, path) > 0;
}

/* What is to happen to this call. Kills the process where that was asked for before it. */
static enum action look(const char *name, const char *full, int needs_room)
{
    if (getpid() != armed_process)
        return NOTHING;
    char path[4096];
    if (!below(full, path))
        return NOTHING;
    if (trace >= 0) {
        char line[4200];
        int length = snprintf(line, sizeof line, "%s\t%s\n", name, path);
        syscall(SYS_write, trace, line, length);
    }
    if (atomic_load(&is_full))
        return needs_room ? FAIL : NOTHING;
    if (action == NOTHING || strcmp(name, target_call) || strcmp(path, target_path) || atomic_fetch_add(&seen, 1) + 1 != occurrence)
        return NOTHING;
    if (action == KILL_BEFORE)
        syscall(SYS_kill, armed_process, SIGKILL);
    if (action == FULL)
        atomic_store(&is_full, 1);
    return action == FULL ? FAIL : action;
}

static enum action look_at_file(const char *name, int file, int needs_room)
{
    char link[64], full[4096];
    if (getpid() != armed_process)
        return NOTHING;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, full, sizeof full - 1);
    if (length < 0)
        return NOTHING;
    full[length] = 0;
    return look(name, full, needs_room);
}

static enum action look_at_path(const char *name, int folder, const char *path, int needs_room)
{
    char full[4096];
    if (getpid() != armed_process || !absolute(folder, path, full))
        return NOTHING;
    return look(name, full, needs_room);
}

static int is_written(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Ends a call: fails it, or makes it and kills the process after. */
#define ANSWER(what, type, call)                          \
    do {                                                  \
        if ((what) == FAIL) {                             \
            errno = error_number;                         \
            return -1;                                    \
        }                                                 \
        type result = (call);                             \
        if ((what) == KILL_AFTER)                         \
            syscall(SYS_kill, armed_process, SIGKILL);    \
        return result;                                    \
    } while (0)

#define HALF(what, size) ((what) == SHORT && (size) > 1 ? (size) / 2 : (size))

ssize_t write(int file, const void *data, size_t size)
{
    enum action what = look_at_file("write", file, 1);
    ANSWER(what, ssize_t, REAL(write)(file, data, HALF(what, size)));
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at)
{
    enum action what = look_at_file("write", file, 1);
    ANSWER(what, ssize_t, REAL(pwrite64)(file, data, HALF(what, size), at));
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    enum action what = look_at_file("write", file, 1);
    ANSWER(what, ssize_t, REAL(writev)(file, parts, what == SHORT && count > 1 ? 1 : count));
}

ssize_t sendfile64(int to, int from, off64_t *at, size_t size)
{
    enum action what = look_at_file("copy", to, 1);
    /* Half of a large number is still the whole file. */
    ANSWER(what, ssize_t, REAL(sendfile64)(to, from, at, what == SHORT ? 100 : size));
}

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags)
{
    enum action what = look_at_file("copy", to, 1);
    ANSWER(what, ssize_t, REAL(copy_file_range)(from, from_at, to, to_at, what == SHORT ? 100 : size, flags));
}

int posix_fallocate64(int file, off64_t at, off64_t size)
{
    enum action what = look_at_file("fallocate", file, 1);
    if (what == FAIL)
        return error_number;
    ANSWER(what, int, REAL(posix_fallocate64)(file, at, size));
}

int fsync(int file)
{
    enum action what = look_at_file("fsync", file, 1);
    ANSWER(what, int, REAL(fsync)(file));
}

int fdatasync(int file)
{
    enum action what = look_at_file("fsync", file, 1);
    ANSWER(what, int, REAL(fdatasync)(file));
}

int ftruncate64(int file, off64_t size)
{
    enum action what = look_at_file("truncate", file, 0);
    ANSWER(what, int, REAL(ftruncate64)(file, size));
}

int truncate64(const char *path, off64_t size)
{
    enum action what = look_at_path("truncate", AT_FDCWD, path, 0);
    ANSWER(what, int, REAL(truncate64)(path, size));
}

#define OPEN(name, signature, folder, ...)                                              \
    int name signature                                                                  \
    {                                                                                   \
        va_list rest;                                                                   \
        va_start(rest, flags);                                                          \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;       \
        va_end(rest);                                                                   \
        enum action what = is_written(flags) ? look_at_path("open", folder, path, flags & O_CREAT) : NOTHING; \
        ANSWER(what, int, REAL(name)(__VA_ARGS__, flags, mode));                        \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, folder, path)

static FILE *opened_stream(const char *path, const char *mode, FILE *(*real)(const char *, const char *))
{
    enum action what = strpbrk(mode, "wa+") ? look_at_path("open", AT_FDCWD, path, 1) : NOTHING;
    if (what == FAIL) {
        errno = error_number;
        return NULL;
    }
    FILE *stream = real(path, mode);
    if (what == KILL_AFTER)
        syscall(SYS_kill, armed_process, SIGKILL);
    return stream;
}

FILE *fopen(const char *path, const char *mode) { return opened_stream(path, mode, REAL(fopen)); }
FILE *fopen64(const char *path, const char *mode) { return opened_stream(path, mode, REAL(fopen64)); }

int rename(const char *from, const char *to)
{
    enum action what = look_at_path("rename", AT_FDCWD, to, 1);
    ANSWER(what, int, REAL(rename)(from, to));
}

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    enum action what = look_at_path("rename", to_folder, to, 1);
    ANSWER(what, int, REAL(renameat)(from_folder, from, to_folder, to));
}

int link(const char *from, const char *to)
{
    enum action what = look_at_path("link", AT_FDCWD, to, 1);
    ANSWER(what, int, REAL(link)(from, to));
}

int symlink(const char *from, const char *to)
{
    enum action what = look_at_path("link", AT_FDCWD, to, 1);
    ANSWER(what, int, REAL(symlink)(from, to));
}

int mkdir(const char *path, mode_t mode)
{
    enum action what = look_at_path("mkdir", AT_FDCWD, path, 1);
    ANSWER(what, int, REAL(mkdir)(path, mode));
}

int mkdirat(int folder, const char *path, mode_t mode)
{
    enum action what = look_at_path("mkdir", folder, path, 1);
    ANSWER(what, int, REAL(mkdirat)(folder, path, mode));
}

int unlink(const char *path)
{
    enum action what = look_at_path("unlink", AT_FDCWD, path, 0);
    ANSWER(what, int, REAL(unlink)(path));
}

int unlinkat(int folder, const char *path, int flags)
{
    enum action what = look_at_path(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path, 0);
    ANSWER(what, int, REAL(unlinkat)(folder, path, flags));
}

int rmdir(const char *path)
{
    enum action what = look_at_path("rmdir", AT_FDCWD, path, 0);
    ANSWER(what, int, REAL(rmdir)(path));
}

int chmod(const char *path, mode_t mode)
{
    enum action what = look_at_path("chmod", AT_FDCWD, path, 0);
    ANSWER(what, int, REAL(chmod)(path, mode));
}

int fchmod(int file, mode_t mode)
{
    enum action what = look_at_file("chmod", file, 0);
    ANSWER(what, int, REAL(fchmod)(file, mode));
}
