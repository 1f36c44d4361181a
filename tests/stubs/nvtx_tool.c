/* A tool that NVTX loads in the place of Nsight Systems: NVTX_INJECTION64_PATH names it.
 *
 * It writes "push THREAD CATEGORY TEXT" and "pop THREAD" for each range of every domain into a file of each process,
 * NVTX_TOOL_OUT followed by ".PID". Laid out by nvToolsExt.h and nvtxTypes.h of NVTX 3, which are not needed to build it.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*function)(void);
typedef const void *(*get_export_table)(uint32_t);
typedef struct {
    size_t size;
    int (*functions)(int module, function ***table, unsigned *size);
} callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
} attributes;

enum { CALLBACKS = 1, CORE2 = 5, PUSH = 4, POP = 5, REGISTER = 10, CREATE = 12, ASCII = 1, REGISTERED = 3 };

static FILE *out;

static long thread(void) { return syscall(SYS_gettid); }

static int push(void *domain, const attributes *event) {
    int known = event->message_type == ASCII || event->message_type == REGISTERED;
    fprintf(out, "push %ld %u %s\n", thread(), event->category, known ? (const char *)event->message : "?");
    fflush(out);
    return 0;
}

static int pop(void *domain) {
    fprintf(out, "pop %ld\n", thread());
    fflush(out);
    return 0;
}

static void *registered(void *domain, const char *text) { return strdup(text); }

static void *create(const char *name) {
    fprintf(out, "domain %s\n", name);
    return strdup(name);
}

int InitializeInjectionNvtx2(get_export_table tables) {
    const callbacks *found = tables(CALLBACKS);
    function **table;
    unsigned size;
    char path[4096];
    const char *base = getenv("NVTX_TOOL_OUT");
    if (!base || !found || !found->functions(CORE2, &table, &size)) return 0;
    snprintf(path, sizeof path, "%s.%d", base, (int)getpid());
    out = fopen(path, "w");
    if (!out) return 0;
    *table[PUSH] = (function)push;
    *table[POP] = (function)pop;
    *table[REGISTER] = (function)registered;
    *table[CREATE] = (function)create;
    return 1;
}
