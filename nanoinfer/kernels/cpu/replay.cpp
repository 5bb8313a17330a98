// A list of kernel calls, one after the other, without Python in between.

#include "common.h"

static const int MOST_ARGUMENTS = 18;

// One call: its whole numbers and pointers in order, and its float, if it has one.
struct Call {
    void *function;
    int64_t arguments[MOST_ARGUMENTS];
    float number;
};

// On x86-64 (System V), whole numbers and pointers on the one hand and floats on the other are passed in registers of their
// own, the former's rest on the stack; so a function finds its own arguments whatever lies behind them.
typedef void (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float);

extern "C" void run_calls(const Call *calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t *a = calls[i].arguments;
        ((Function)calls[i].function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
                                      a[16], a[17], calls[i].number);
    }
}
