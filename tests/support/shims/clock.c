/* Moves the time of day of a process by the seconds in a file, as setting the clock does.

   Waits until a time of day end early or late, as the kernel's do: they are cut into slices, and
   the file is read after each. The monotonic clock does not change. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 1000000LL
#define SECOND_NS 1000000000LL
#define NEXT(name, version) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlvsym(RTLD_NEXT, #name, version)

static const int64_t none;
static volatile const int64_t *moved;

static long call(long number, long a, long b, long c, long d, long e, long f) {
  static long (*real)(long, ...);
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return real(number, a, b, c, d, e, f);
}

static int64_t moved_s(void) {
  if (!moved) {
    const char *file = getenv("CLOCK_FILE");
    int handle = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    void *page = MAP_FAILED;
    if (handle >= 0) {
      page = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, handle, 0);
      close(handle);
    }
    moved = page == MAP_FAILED ? &none : page;
  }
  return *moved;
}

static int true_time(clockid_t clock, struct timespec *time) {
  return call(SYS_clock_gettime, clock, (long)time, 0, 0, 0, 0);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int failed = true_time(clock, time);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    time->tv_sec += moved_s();
  return failed;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *time) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (time) *time = now.tv_sec;
  return now.tv_sec;
}

/* Set the true end of the next slice; return whether `end` is still ahead. */
static int next_slice(const struct timespec *end, struct timespec *slice) {
  true_time(CLOCK_REALTIME, slice);
  int64_t left = (end->tv_sec - moved_s() - slice->tv_sec) * SECOND_NS;
  left += end->tv_nsec - slice->tv_nsec;
  if (left <= 0) return 0;
  int64_t ns = slice->tv_nsec + (left < SLICE_NS ? left : SLICE_NS);
  slice->tv_sec += ns / SECOND_NS;
  slice->tv_nsec = ns % SECOND_NS;
  return 1;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                           const struct timespec *end) {
  NEXT(pthread_cond_timedwait, "GLIBC_2.3.2");
  if (end->tv_sec < SECOND_NS) return real(condition, mutex, end); /* a monotonic time */
  for (;;) {
    struct timespec slice;
    int ahead = next_slice(end, &slice), error = real(condition, mutex, &slice);
    if (error != ETIMEDOUT || !ahead) return error;
  }
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *end) {
  NEXT(pthread_cond_clockwait, "GLIBC_2.34");
  if (clock != CLOCK_REALTIME) return real(condition, mutex, clock, end);
  for (;;) {
    struct timespec slice;
    int ahead = next_slice(end, &slice), error = real(condition, mutex, clock, &slice);
    if (error != ETIMEDOUT || !ahead) return error;
  }
}

int sem_timedwait(sem_t *semaphore, const struct timespec *end) {
  NEXT(sem_timedwait, "GLIBC_2.34");
  for (;;) {
    struct timespec slice;
    int ahead = next_slice(end, &slice), failed = real(semaphore, &slice);
    if (!failed || errno != ETIMEDOUT || !ahead) return failed;
  }
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *end) {
  NEXT(sem_clockwait, "GLIBC_2.34");
  return clock == CLOCK_REALTIME ? sem_timedwait(semaphore, end) : real(semaphore, clock, end);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *end) {
  NEXT(pthread_mutex_timedlock, "GLIBC_2.34");
  for (;;) {
    struct timespec slice;
    int ahead = next_slice(end, &slice), error = real(mutex, &slice);
    if (error != ETIMEDOUT || !ahead) return error;
  }
}

/* The library of gRPC waits by the system call itself. */
long syscall(long number, ...) {
  va_list rest;
  long given[6];
  va_start(rest, number);
  for (int i = 0; i < 6; i++) given[i] = va_arg(rest, long);
  va_end(rest);
  const struct timespec *end = (const struct timespec *)given[3];
  int waits = number == SYS_futex && (given[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
  if (!waits || !(given[1] & FUTEX_CLOCK_REALTIME) || !end)
    return call(number, given[0], given[1], given[2], given[3], given[4], given[5]);
  for (;;) {
    struct timespec slice;
    int ahead = next_slice(end, &slice);
    long failed = call(number, given[0], given[1], given[2], (long)&slice, given[4], given[5]);
    if (!failed || errno != ETIMEDOUT || !ahead) return failed;
  }
}
