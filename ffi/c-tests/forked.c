/* A forked child has none of its parent's handles: every call with one returns FB_CLOSED there, and the parent
 * continues. Objects that the child creates are its own. */

#include "calls.h"

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* In the child: makes each call with each handle of the parent. */
static void every_call_is_closed(world *w) {
    for (uint32_t index = 0; index < CALL_COUNT; index++) {
        const call *made = &CALLS[index];
        for (kind of = DEVICE; of < CAPTURED; of++) {
            if (made->on == of || made->on == KINDS) {
                refused(w, made, handle_of(w, of), 0, FB_CLOSED);
            }
        }
    }
}

/* In the child: makes a device and a cache of its own. */
static void own_cache(void) {
    fb_device *device = device_of(FB_DEVICE_HOST);
    fb_cache_config config = declared();
    fb_cache *cache = cache_of(device, &config);
    story of;
    open_story(cache, &of, 40, NULL);
    for (uint32_t number = 0; number < 4; number++) {
        decode_step(cache, &of, 1, number, 1);
    }
    OK(cache, fb_close(cache, of.sequence, NULL));
    end_all(device, cache);
}

/* The child ends as another program. It has copies of the parent's objects that no call frees, which a leak check at
 * its exit would report. */
static void in_child(world *w) {
    every_call_is_closed(w);
    own_cache();
    (void)execlp("true", "true", (char *)NULL);
    _exit(2);
}

int main(void) {
    world *w = (world *)calloc(1, sizeof *w);
    story of;
    CHECK(w != NULL);
    make_world(w);
    open_story(w->cache, &of, 50, NULL);
    for (uint32_t turn = 0; turn < 3; turn++) {
        int status = -1;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            in_child(w);
        }
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        /* The pool of rows is shared with the child, which has not touched it. */
        compare_stored(w->cache, &of, 50);
        OK(w->cache, fb_cache_validate(w->cache));
    }
    OK(w->cache, fb_close(w->cache, of.sequence, NULL));
    end_world(w);
    free(w);
    return checked();
}
