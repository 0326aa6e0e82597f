// The argument of kernel.cpp's kernel, with the bad access that a test plants in it.
#pragma once

enum Plant : unsigned { NONE, DYNAMIC, STATIC, FRAME };

struct FoldArgs {
    unsigned long long from, to;
    unsigned count;
    Plant plant;
};
