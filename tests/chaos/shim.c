/* A disk that is slow, full or read-only below one directory, and a wall clock that jumps, while processes run. Preloaded into every
 * process of a run.
 *
 * CHAOS_ROOT: the directory. CHAOS_CONTROL: a file of four 32-bit integers, mapped by all processes: the mode of the disk, bytes a
 * second, milliseconds that an fsync takes, and the seconds by which the clock is off. Times of files stay those of the file system,
 * as on a file server with another clock. (libfaketime 0.9.10 is no alternative: with the monotonic clock left as it is, sleeping fails.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { HEALTHY, SLOW, FULL, READ_ONLY };
enum { PIECE_BYTES = 16384 };
struct control { int mode, bytes_per_second, fsync_milliseconds, clock_seconds; };

static struct control healthy = {HEALTHY, 0, 0, 0};
static volatile struct control *control = &healthy;
static const char *root = "";

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("CHAOS_CONTROL"), *directory = getenv("CHAOS_ROOT");
    int file = path && directory ? REAL(open)(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return;
    root = directory;
    control = mapped;
}

static int is_below(const char *path) {
    size_t length = strlen(root);
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int is_file_below(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int is_path_below(int directory, const char *path) {
    return path[0] == '/' ? is_below(path) : directory != AT_FDCWD && is_file_below(directory);
}

static int refuses(int mode, int directory, const char *path) {
    if (control->mode != mode || !is_path_below(directory, path)) return 0;
    errno = mode == FULL ? ENOSPC : EROFS;
    return 1;
}

static void take(size_t bytes) {
    int rate = control->bytes_per_second;
    if (control->mode == SLOW && rate > 0) usleep((useconds_t)(1e6 * bytes / rate));
}

/* The length that may be written now, or -1. A slow disk takes pieces, so that bytes move all the time. */
static ssize_t taken(int file, size_t length) {
    int mode = control->mode;
    if (mode == HEALTHY || !is_file_below(file)) return length;
    if (mode == SLOW) {
        length = length < PIECE_BYTES ? length : PIECE_BYTES;
        take(length);
        return length;
    }
    errno = mode == FULL ? ENOSPC : EROFS;
    return -1;
}

ssize_t write(int file, const void *data, size_t length) {
    ssize_t left = taken(file, length);
    return left < 0 ? -1 : REAL(write)(file, data, left);
}

#define PWRITE(name, offset_type) \
    ssize_t name(int file, const void *data, size_t length, offset_type offset) { \
        return taken(file, length) < 0 ? -1 : REAL(name)(file, data, length, offset); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define FSYNC(name) \
    int name(int file) { \
        if (control->mode == SLOW && is_file_below(file)) usleep(1000u * control->fsync_milliseconds); \
        return REAL(name)(file); \
    }
FSYNC(fsync)
FSYNC(fdatasync)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && refuses(READ_ONLY, AT_FDCWD, path)) return -1; \
        return REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && refuses(READ_ONLY, directory, path)) return -1; \
        return REAL(name)(directory, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
    return refuses(READ_ONLY, AT_FDCWD, path) || refuses(FULL, AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    return refuses(READ_ONLY, AT_FDCWD, from) || refuses(READ_ONLY, AT_FDCWD, to) ? -1 : REAL(rename)(from, to);
}

int unlink(const char *path) {
    return refuses(READ_ONLY, AT_FDCWD, path) ? -1 : REAL(unlink)(path);
}

int unlinkat(int directory, const char *path, int flags) {
    return refuses(READ_ONLY, directory, path) ? -1 : REAL(unlinkat)(directory, path, flags);
}

int rmdir(const char *path) {
    return refuses(READ_ONLY, AT_FDCWD, path) ? -1 : REAL(rmdir)(path);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += control->clock_seconds;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    if (!result && now) now->tv_sec += control->clock_seconds;
    return result;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}

/* A deadline by the wall clock as the kernel has it; one by the monotonic clock, which counts from the last boot, stays. */
static struct timespec real_deadline(const struct timespec *deadline) {
    struct timespec real = *deadline;
    if (real.tv_sec > 1000000000) real.tv_sec -= control->clock_seconds;
    return real;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    struct timespec real = real_deadline(deadline);
    return REAL(sem_timedwait)(semaphore, &real);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    struct timespec real = real_deadline(deadline);
    return ((__typeof__(&pthread_cond_timedwait))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"))(condition, mutex, &real);
}
