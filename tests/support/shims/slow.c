/* Delays each access to a folder and what is below it, as a file system across a network does. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define MODE \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list rest; \
    va_start(rest, flags); \
    mode = va_arg(rest, mode_t); \
    va_end(rest); \
  }

static const char *folder;
static size_t length;
static struct timespec delay;

__attribute__((constructor)) static void begin(void) {
  const char *ms = getenv("SLOW_MS");
  folder = getenv("SLOW_FOLDER");
  length = folder && ms ? strlen(folder) : 0;
  delay.tv_sec = ms ? atol(ms) / 1000 : 0;
  delay.tv_nsec = ms ? atol(ms) % 1000 * 1000000 : 0;
}

static void pass(const char *path) {
  if (length && !strncmp(path, folder, length)) nanosleep(&delay, NULL);
}

static void pass_at(int parent, const char *path) {
  if (*path == '/' || parent == AT_FDCWD) return pass(path);
  char link[32], target[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", parent);
  ssize_t count = length ? readlink(link, target, sizeof target - 1) : 0;
  if (count <= 0) return;
  target[count] = 0;
  pass(target);
}

int open(const char *path, int flags, ...) {
  NEXT(open);
  MODE
  pass(path);
  return real(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  NEXT(open64);
  MODE
  pass(path);
  return real(path, flags, mode);
}

int openat(int parent, const char *path, int flags, ...) {
  NEXT(openat);
  MODE
  pass_at(parent, path);
  return real(parent, path, flags, mode);
}

int openat64(int parent, const char *path, int flags, ...) {
  NEXT(openat64);
  MODE
  pass_at(parent, path);
  return real(parent, path, flags, mode);
}

FILE *fopen(const char *path, const char *mode) {
  NEXT(fopen);
  pass(path);
  return real(path, mode);
}

FILE *fopen64(const char *path, const char *mode) {
  NEXT(fopen64);
  pass(path);
  return real(path, mode);
}

DIR *opendir(const char *path) {
  NEXT(opendir);
  pass(path);
  return real(path);
}

int stat(const char *restrict path, struct stat *restrict found) {
  NEXT(stat);
  pass(path);
  return real(path, found);
}

int lstat(const char *restrict path, struct stat *restrict found) {
  NEXT(lstat);
  pass(path);
  return real(path, found);
}

int stat64(const char *restrict path, struct stat64 *restrict found) {
  NEXT(stat64);
  pass(path);
  return real(path, found);
}

int lstat64(const char *restrict path, struct stat64 *restrict found) {
  NEXT(lstat64);
  pass(path);
  return real(path, found);
}

int fstatat64(int parent, const char *restrict path, struct stat64 *restrict found, int flags) {
  NEXT(fstatat64);
  pass_at(parent, path);
  return real(parent, path, found, flags);
}

ssize_t read(int handle, void *bytes, size_t count) {
  NEXT(read);
  pass_at(handle, "");
  return real(handle, bytes, count);
}

int fsync(int handle) {
  NEXT(fsync);
  pass_at(handle, "");
  return real(handle);
}

int rename(const char *old, const char *path) {
  NEXT(rename);
  pass(path);
  return real(old, path);
}
