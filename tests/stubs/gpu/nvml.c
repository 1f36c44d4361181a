/* A stand-in for libnvidia-ml.so.1: as many GPUs as the file $NVML_STUB has lines, each
 *
 *     UUID BUS-ID NAME MIG ENERGY [WORD ...]
 *
 * with MIG 0 or 1 and ENERGY one of
 *     fixed:MJ                 the counter stands still
 *     power:MILLIWATTS:STEP_MS the counter grows with the clock, every STEP_MS milliseconds, at most at the power limit
 *     unsupported | lost       the driver refuses; a lost GPU refuses whatever follows too
 * What a line does not name is not supported; WORD is any of
 *     power=MW                 nvmlDeviceGetPowerUsage
 *     instant=MW average=MW    field values of the GPU; module=MW is the instant one of the module around it
 *     use=GPU:MEMORY           utilisation in per cent
 *     memory=USED:TOTAL        bytes
 *     instance=UUID            a MIG instance, several times
 *     limits=MIN:DEFAULT:MAX   of the power limit in mW; clocks=MIN:MAX in MHz, outside of which locking is refused
 *     denied                   limits and clocks may be read, and are not ours to change
 * The file is read again at each call, so that a test can change its mind. What programs set is kept in $NVML_STUB.set,
 * a line `UUID LIMIT_MW SINCE_MS BASE_MJ LOW_MHZ HIGH_MHZ` for each GPU that was touched.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15
};
enum { MOST = 64, INSTANCES = 8, FIRST_INSTANCE = 1000, LINE = 1024 };
enum { FIELD_AVERAGE = 185, FIELD_INSTANT = 186, SCOPE_GPU = 0, SCOPE_MODULE = 1, UNSIGNED_INT = 1 };

struct gpu {
    char uuid[96], bus[32], name[96], energy[64], instances[INSTANCES][96];
    int mig, instance_count, denied;
    long long power, instant, average, module, use, use_memory, used, total; /* -1: not supported */
    long long limit_min, limit_default, limit_max, clock_min, clock_max;
};

static void words(struct gpu *gpu, char *rest) {
    char *word, *place = NULL;
    for (word = strtok_r(rest, " \n", &place); word; word = strtok_r(NULL, " \n", &place)) {
        sscanf(word, "power=%lld", &gpu->power);
        sscanf(word, "instant=%lld", &gpu->instant);
        sscanf(word, "average=%lld", &gpu->average);
        sscanf(word, "module=%lld", &gpu->module);
        sscanf(word, "use=%lld:%lld", &gpu->use, &gpu->use_memory);
        sscanf(word, "memory=%lld:%lld", &gpu->used, &gpu->total);
        sscanf(word, "limits=%lld:%lld:%lld", &gpu->limit_min, &gpu->limit_default, &gpu->limit_max);
        sscanf(word, "clocks=%lld:%lld", &gpu->clock_min, &gpu->clock_max);
        if (!strcmp(word, "denied")) gpu->denied = 1;
        if (gpu->instance_count < INSTANCES && sscanf(word, "instance=%95s", gpu->instances[gpu->instance_count]) == 1)
            gpu->instance_count++;
    }
}

static int load(struct gpu *gpus) {
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[LINE];
    int count = 0, end;
    if (!file) return -1;
    while (count < MOST && fgets(line, sizeof line, file)) {
        struct gpu *gpu = &gpus[count];
        memset(gpu, 0, sizeof *gpu);
        gpu->power = gpu->instant = gpu->average = gpu->module = gpu->use = gpu->use_memory = -1;
        gpu->used = gpu->total = gpu->limit_min = gpu->limit_default = gpu->limit_max = -1;
        gpu->clock_min = gpu->clock_max = -1;
        if (sscanf(line, "%95s %31s %95s %d %63s%n", gpu->uuid, gpu->bus, gpu->name, &gpu->mig, gpu->energy, &end) != 5)
            continue;
        words(gpu, line + end);
        count++;
    }
    fclose(file);
    return count;
}

/* Handles are indices plus one, since a handle is never NULL; those of instances begin above all GPUs. */
static int find(void *handle, struct gpu *found) {
    struct gpu gpus[MOST];
    long index = (long)handle - 1;
    if (index < 0 || index >= load(gpus)) return INVALID_ARGUMENT;
    *found = gpus[index];
    return SUCCESS;
}

/* Find a GPU that is asked how it does: a lost one does not answer. */
static int find_alive(void *handle, struct gpu *found) {
    int code = find(handle, found);
    return !code && !strcmp(found->energy, "lost") ? GPU_IS_LOST : code;
}

static int instance_of(void *handle, struct gpu *parent, int *index) {
    long code = (long)handle - 1 - FIRST_INSTANCE;
    if (code < 0 || find((void *)(code / INSTANCES + 1), parent)) return INVALID_ARGUMENT;
    *index = (int)(code % INSTANCES);
    return *index < parent->instance_count ? SUCCESS : INVALID_ARGUMENT;
}

static int text(char *buffer, unsigned length, const char *value) {
    snprintf(buffer, length, "%s", value);
    return SUCCESS;
}

static int number(long long value, unsigned *found) {
    if (value < 0) return NOT_SUPPORTED;
    *found = (unsigned)value;
    return SUCCESS;
}

static long long clock_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* What programs set. */
struct set { char uuid[96]; long long limit, since_ms, base_mj, low, high; };

static int load_set(struct set *sets, const char *path) {
    FILE *file = fopen(path, "r");
    int count = 0;
    if (!file) return 0;
    while (count < MOST && fscanf(file, "%95s %lld %lld %lld %lld %lld", sets[count].uuid, &sets[count].limit,
                                  &sets[count].since_ms, &sets[count].base_mj, &sets[count].low,
                                  &sets[count].high) == 6)
        count++;
    fclose(file);
    return count;
}

static void set_path(char *path, size_t length, const char *ending) {
    snprintf(path, length, "%s.set%s", getenv("NVML_STUB"), ending);
}

static struct set set_of(const struct gpu *gpu) {
    struct set sets[MOST], none;
    char path[LINE];
    int count;
    memset(&none, 0, sizeof none);
    strcpy(none.uuid, gpu->uuid);
    none.limit = gpu->limit_default;
    set_path(path, sizeof path, "");
    count = load_set(sets, path);
    for (int index = 0; index < count; index++)
        if (!strcmp(sets[index].uuid, gpu->uuid)) return sets[index];
    return none;
}

/* Replace the line of a GPU; the file is whole at any time, whoever reads or dies. */
static int keep(const struct set *changed) {
    struct set sets[MOST];
    char path[LINE], new[LINE], lock[LINE];
    int count, held;
    FILE *file;
    set_path(path, sizeof path, "");
    set_path(new, sizeof new, ".new");
    set_path(lock, sizeof lock, ".lock");
    held = open(lock, O_CREAT | O_RDWR, 0600);
    flock(held, LOCK_EX);
    count = load_set(sets, path);
    file = fopen(new, "w");
    for (int index = 0; index < count; index++)
        if (strcmp(sets[index].uuid, changed->uuid))
            fprintf(file, "%s %lld %lld %lld %lld %lld\n", sets[index].uuid, sets[index].limit, sets[index].since_ms,
                    sets[index].base_mj, sets[index].low, sets[index].high);
    fprintf(file, "%s %lld %lld %lld %lld %lld\n", changed->uuid, changed->limit, changed->since_ms, changed->base_mj,
            changed->low, changed->high);
    fclose(file);
    rename(new, path);
    close(held);
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
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) { return text(version, length, "580.00.00"); }

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
    for (int index = 0; index < count; index++) {
        if (!strcmp(gpus[index].uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2((unsigned)index, handle);
        for (int instance = 0; instance < gpus[index].instance_count; instance++)
            if (!strcmp(gpus[index].instances[instance], uuid)) {
                *handle = (void *)(long)(FIRST_INSTANCE + index * INSTANCES + instance + 1);
                return SUCCESS;
            }
    }
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
    int code, index;
    if (!instance_of(handle, &gpu, &index)) return text(uuid, length, gpu.instances[index]);
    code = find(handle, &gpu);
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

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **parent) {
    struct gpu gpu;
    int index;
    if (instance_of(handle, &gpu, &index)) return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByUUID(gpu.uuid, parent);
}

/* The counter; a power limit that was set at `since` changes its slope, and takes nothing back. */
static int energy(const struct gpu *gpu, unsigned long long *mj) {
    long long milliwatts, step_ms;
    struct set set = set_of(gpu);
    if (sscanf(gpu->energy, "fixed:%llu", mj) == 1) return SUCCESS;
    if (sscanf(gpu->energy, "power:%lld:%lld", &milliwatts, &step_ms) != 2) return NOT_SUPPORTED;
    if (set.limit > 0 && set.limit < milliwatts) milliwatts = set.limit;
    *mj = (unsigned long long)(set.base_mj + (clock_ms() / step_ms * step_ms - set.since_ms) * milliwatts / 1000);
    if ((long long)*mj < set.base_mj) *mj = (unsigned long long)set.base_mj;
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *mj) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    return code ? code : energy(&gpu, mj);
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    return code ? code : number(gpu.power, milliwatts);
}

struct field {
    unsigned id, scope;
    long long timestamp, latency_us;
    int type, code;
    union { double d; unsigned u; unsigned long long ull; } value;
};

int nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    if (code) return code;
    for (int index = 0; index < count; index++) {
        struct field *field = &fields[index];
        long long found = field->id == FIELD_AVERAGE && field->scope == SCOPE_GPU     ? gpu.average
                          : field->id == FIELD_INSTANT && field->scope == SCOPE_GPU    ? gpu.instant
                          : field->id == FIELD_INSTANT && field->scope == SCOPE_MODULE ? gpu.module
                                                                                       : -1;
        field->type = UNSIGNED_INT;
        field->timestamp = clock_ms() * 1000;
        field->code = number(found, &field->value.u);
    }
    return SUCCESS;
}

struct rates { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(void *handle, struct rates *rates) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    if (!code) code = number(gpu.use, &rates->gpu);
    return code ? code : number(gpu.use_memory, &rates->memory);
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    if (code || gpu.total < 0) return code ? code : NOT_SUPPORTED;
    memory->total = (unsigned long long)gpu.total;
    memory->used = (unsigned long long)gpu.used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    return code ? code : number(gpu.limit_default < 0 ? -1 : set_of(&gpu).limit, milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
    return nvmlDeviceGetPowerManagementLimit(handle, milliwatts);
}

int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *milliwatts) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    return code ? code : number(gpu.limit_default, milliwatts);
}

int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *least, unsigned *most) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    if (!code) code = number(gpu.limit_min, least);
    return code ? code : number(gpu.limit_max, most);
}

int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned milliwatts) {
    struct gpu gpu;
    struct set set;
    unsigned long long mj = 0;
    int code = find_alive(handle, &gpu);
    if (code) return code;
    if (gpu.limit_default < 0) return NOT_SUPPORTED;
    if (gpu.denied) return NO_PERMISSION;
    if (milliwatts < gpu.limit_min || milliwatts > gpu.limit_max) return INVALID_ARGUMENT;
    set = set_of(&gpu);
    if (!strncmp(gpu.energy, "power:", 6) && !energy(&gpu, &mj)) {
        set.base_mj = (long long)mj;
        set.since_ms = clock_ms();
    }
    set.limit = milliwatts;
    return keep(&set);
}

static int lock_clocks(void *handle, unsigned low, unsigned high, int reset) {
    struct gpu gpu;
    struct set set;
    int code = find_alive(handle, &gpu);
    if (code) return code;
    if (gpu.clock_max < 0) return NOT_SUPPORTED;
    if (gpu.denied) return NO_PERMISSION;
    if (!reset && (low > high || low < gpu.clock_min || high > gpu.clock_max)) return INVALID_ARGUMENT;
    set = set_of(&gpu);
    set.low = low;
    set.high = high;
    return keep(&set);
}

int nvmlDeviceSetGpuLockedClocks(void *handle, unsigned low, unsigned high) {
    return lock_clocks(handle, low, high, 0);
}

int nvmlDeviceResetGpuLockedClocks(void *handle) { return lock_clocks(handle, 0, 0, 1); }

/* Of the graphics clock (0) and the one of the multiprocessors (1), MHz: locked, it runs as high as it may. */
int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *mhz) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    if (code || type > 1) return code ? code : NOT_SUPPORTED;
    return number(gpu.clock_max > 0 && set_of(&gpu).high > 0 ? set_of(&gpu).high : gpu.clock_max, mhz);
}

int nvmlDeviceGetMaxClockInfo(void *handle, int type, unsigned *mhz) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    return code || type > 1 ? (code ? code : NOT_SUPPORTED) : number(gpu.clock_max, mhz);
}

int nvmlDeviceGetMinMaxClockOfPState(void *handle, int type, int state, unsigned *low, unsigned *high) {
    struct gpu gpu;
    int code = find_alive(handle, &gpu);
    if (code || type > 1 || state) return code ? code : NOT_SUPPORTED;
    return number(gpu.clock_min, low) || number(gpu.clock_max, high) ? NOT_SUPPORTED : SUCCESS;
}
