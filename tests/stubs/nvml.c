/* A stand-in for libnvidia-ml.so.1: as many GPUs as the file $NVML_STUB has lines, each
 *
 *     UUID BUS-ID NAME MIG ENERGY
 *
 * with MIG 0 or 1 and ENERGY one of
 *     fixed:MJ                 the counter stands still
 *     power:MILLIWATTS:STEP_MS the counter grows with the clock, every STEP_MS milliseconds
 *     unsupported | lost       the driver refuses
 * The file is read again at each call, so that a test can change its mind.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
#define MOST 64

struct gpu { char uuid[96], bus[32], name[96], energy[64]; int mig; };

static int load(struct gpu *gpus) {
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    int count = 0;
    if (!file) return -1;
    while (count < MOST && fscanf(file, "%95s %31s %95s %d %63s", gpus[count].uuid, gpus[count].bus, gpus[count].name,
                                  &gpus[count].mig, gpus[count].energy) == 5)
        count++;
    fclose(file);
    return count;
}

/* Handles are indices plus one, since a handle is never NULL. */
static int find(void *handle, struct gpu *found) {
    struct gpu gpus[MOST];
    long index = (long)handle - 1;
    if (index < 0 || index >= load(gpus)) return INVALID_ARGUMENT;
    *found = gpus[index];
    return SUCCESS;
}

static int text(char *buffer, unsigned length, const char *value) {
    snprintf(buffer, length, "%s", value);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    struct gpu gpus[MOST];
    (void)flags;
    return load(gpus) < 0 ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    struct gpu gpus[MOST];
    *count = (unsigned)load(gpus);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    struct gpu gpus[MOST];
    if ((int)index >= load(gpus)) return INVALID_ARGUMENT;
    *handle = (void *)((long)index + 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    struct gpu gpus[MOST];
    int count = load(gpus);
    for (int index = 0; index < count; index++)
        if (!strcmp(gpus[index].uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2((unsigned)index, handle);
    return NOT_FOUND;
}

/* CUDA writes the domain in four digits, NVML in eight. */
static int same_place(const char *one, const char *other) {
    unsigned a[3], b[3];
    return sscanf(one, "%x:%x:%x", &a[0], &a[1], &a[2]) == 3 && sscanf(other, "%x:%x:%x", &b[0], &b[1], &b[2]) == 3 &&
           !memcmp(a, b, sizeof a);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    struct gpu gpus[MOST];
    int count = load(gpus);
    for (int index = 0; index < count; index++)
        if (same_place(gpus[index].bus, bus)) return nvmlDeviceGetHandleByIndex_v2((unsigned)index, handle);
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    struct gpu gpu;
    int code = find(handle, &gpu);
    return code ? code : text(uuid, length, gpu.uuid);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    struct gpu gpu;
    int code = find(handle, &gpu);
    return code ? code : text(name, length, gpu.name);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    struct gpu gpu;
    int code = find(handle, &gpu);
    if (code) return code;
    *current = *pending = (unsigned)gpu.mig;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *mj) {
    struct gpu gpu;
    long long milliwatts, step_ms, now_ms;
    struct timespec now;
    int code = find(handle, &gpu);
    if (code) return code;
    if (sscanf(gpu.energy, "fixed:%llu", mj) == 1) return SUCCESS;
    if (sscanf(gpu.energy, "power:%lld:%lld", &milliwatts, &step_ms) == 2) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        now_ms = now.tv_sec * 1000LL + now.tv_nsec / 1000000;
        *mj = (unsigned long long)(now_ms / step_ms * step_ms * milliwatts / 1000);
        return SUCCESS;
    }
    return strcmp(gpu.energy, "lost") ? NOT_SUPPORTED : GPU_IS_LOST;
}
