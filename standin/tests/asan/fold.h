// What the kernel of kernel.cpp takes, and which bad access is planted in it.
#pragma once

enum Plant : unsigned { NONE, DYNAMIC, STATIC, FRAME };

struct FoldArgs {
    unsigned long long from, to;
    unsigned count;
    Plant plant;
};
