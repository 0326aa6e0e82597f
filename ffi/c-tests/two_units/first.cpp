// The header in one of two units of a program: included twice, and before anything else.

#include <forebay.h>
#include <forebay.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

bool second_agrees(std::uint32_t version, std::size_t config, fb_status closed);

int main() {
    unsigned agreed = 0;
    for (unsigned turn = 0; turn < 11; turn++) {
        agreed += second_agrees(fb_abi_version(), sizeof(fb_cache_config), FB_CLOSED) ? 1 : 0;
    }
    std::printf("%u checks\n", agreed);
    return agreed == 11 ? 0 : 1;
}
