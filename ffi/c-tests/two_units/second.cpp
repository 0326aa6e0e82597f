// The header in the other unit, after the headers that C++ programs include first.

#include <cstddef>
#include <cstdint>

#include <forebay.h>

bool second_agrees(std::uint32_t version, std::size_t config, fb_status closed);

bool second_agrees(std::uint32_t version, std::size_t config, fb_status closed) {
    return version == FB_ABI_VERSION && config == sizeof(fb_cache_config) && closed == FB_CLOSED &&
           fb_status_text(closed) != nullptr;
}
