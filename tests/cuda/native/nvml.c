/* The management library of a driver that is not there, as `libnvidia-ml.so.1`. */
#include <stdio.h>
#include <stdlib.h>

typedef struct {
  unsigned long long total, free, used;
} memory_t;

static const char *named(const char *name, const char *otherwise) {
  const char *text = getenv(name);
  return text && *text ? text : otherwise;
}
static unsigned count(void) { return (unsigned)atoi(named("EMULATED_CUDA_DEVICES", "1")); }

/* A file with the indices of devices that fell off the bus. */
static int is_lost(unsigned index) {
  FILE *file = fopen(named("EMULATED_CUDA_LOST", ""), "r");
  unsigned each;
  int found = 0;
  if (!file) return 0;
  while (fscanf(file, "%u", &each) == 1) found |= each == index;
  fclose(file);
  return found;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *found) {
  *found = count();
  return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "%s", named("EMULATED_CUDA_DRIVER", "580.95.05"));
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(long)(index + 1);
  return index >= count() ? 2 : is_lost(index) ? 15 : 0; /* NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_GPU_IS_LOST */
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  (void)handle;
  snprintf(text, size, "%s", named("EMULATED_CUDA_NAME", "NVIDIA H100 80GB HBM3"));
  return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  snprintf(text, size, "GPU-00000000-0000-0000-0000-%012ld", (long)handle);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
  (void)handle;
  memory->total = (unsigned long long)(atof(named("EMULATED_CUDA_MEMORY_GIB", "79.6")) * (1ULL << 30));
  memory->used = (unsigned long long)(atof(named("EMULATED_CUDA_USED_GIB", "0.5")) * (1ULL << 30));
  memory->free = memory->total - memory->used;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  (void)handle;
  return sscanf(named("EMULATED_CUDA_CAPABILITY", "9.0"), "%d.%d", major, minor) == 2 ? 0 : 3; /* NVML_ERROR_NOT_SUPPORTED */
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  long number;
  if (sscanf(uuid, "GPU-00000000-0000-0000-0000-%ld", &number) != 1) return 6; /* NVML_ERROR_NOT_FOUND */
  *handle = (void *)number;
  return is_lost((unsigned)number - 1) ? 15 : 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
  (void)handle;
  rates[0] = rates[1] = (unsigned)atoi(named("EMULATED_CUDA_BUSY_PERCENT", "0"));
  return 0;
}
int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *milliwatts) {
  (void)handle;
  *milliwatts = 700000;
  return 0;
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) {
  (void)handle;
  *milliwatts = 1000 * (unsigned)atoi(named("EMULATED_CUDA_POWER_WATTS", "700"));
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
  (void)handle;
  *reasons = strtoull(named("EMULATED_CUDA_SLOWED", "0"), NULL, 0);
  return 0;
}
int nvmlDeviceGetClockInfo(void *handle, unsigned clock, unsigned *mhz) {
  (void)handle, (void)clock;
  *mhz = 1980;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void *handle, unsigned error, unsigned counter, unsigned long long *errors) {
  (void)handle, (void)error, (void)counter;
  *errors = strtoull(named("EMULATED_CUDA_ECC_ERRORS", "0"), NULL, 0);
  return 0;
}
const char *nvmlErrorString(int result) { return result == 0 ? "Success" : result == 15 ? "GPU is lost" : "Unknown Error"; }
