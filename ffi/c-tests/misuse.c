/* Wrong pointers and handles from a caller: each gives a status, and the library writes nothing. */

#include "calls.h"

/* NULL for every pointer of every call, including the handle. */
static void nulls(world *w) {
    for (uint32_t index = 0; index < CALL_COUNT; index++) {
        const call *made = &CALLS[index];
        if (made->on != NO_HANDLE) {
            refused(w, made, NULL, 0, FB_INVALID_CONFIG);
        }
        for (uint32_t null = 1; null <= made->pointers; null++) {
            refused(w, made, handle_of(w, made->on), null, FB_INVALID_CONFIG);
        }
    }
}

/* A handle of another kind. */
static void wrong_kinds(world *w) {
    for (uint32_t index = 0; index < CALL_COUNT; index++) {
        for (kind of = DEVICE; of < CAPTURED; of++) {
            if (CALLS[index].on != of && CALLS[index].on != NO_HANDLE && CALLS[index].on != KINDS) {
                refused(w, &CALLS[index], handle_of(w, of), 0, FB_INVALID_CONFIG);
            }
        }
    }
}

/* Pointers that were never handles: to the caller's memory, and arbitrary numbers. */
static void invented(world *w) {
    uint64_t own[8] = {0};
    void *heap = calloc(1, 64);
    CHECK(heap != NULL);
    for (uint32_t index = 0; index < CALL_COUNT; index++) {
        void *wrong[] = {own, heap, (void *)8, (void *)UINTPTR_MAX, (void *)((uintptr_t)1 << 63),
                         (void *)((uintptr_t)w->cache ^ 1), (void *)((uintptr_t)w->cache ^ (uintptr_t)1 << 40)};
        for (size_t at = 0; CALLS[index].on != NO_HANDLE && at < sizeof wrong / sizeof wrong[0]; at++) {
            answers before;
            memset(&w->out, 0x5a, sizeof w->out);
            fb_status found = CALLS[index].attempt(w, wrong[at], 0);
            CHECK(found == FB_CLOSED || found == FB_INVALID_CONFIG);
            memset(&before, 0x5a, sizeof before);
            CHECK(memcmp((char *)&before + sizeof(size_t), (char *)&w->out + sizeof(size_t),
                         sizeof before - sizeof(size_t)) == 0);
        }
    }
    free(heap);
    CHECK(own[0] == 0 && own[7] == 0);
}

/* A handle after its end, while another object of its kind exists. */
static void ended(world *w) {
    world gone;
    make_world(&gone);
    world handles = gone;
    end_world(&gone);
    for (uint32_t index = 0; index < CALL_COUNT; index++) {
        const call *made = &CALLS[index];
        for (kind of = DEVICE; of < CAPTURED; of++) {
            if (made->on == of || made->on == KINDS) {
                refused(w, made, handle_of(&handles, of), 0, FB_CLOSED);
            }
        }
    }
}

/* Sequence and step numbers of another cache. */
static void foreign(world *w) {
    world other;
    uint64_t sequence = w->sequence;
    fb_step step = w->step;
    make_world(&other);
    uint64_t dense_sequence = w->dense_sequence;
    fb_step dense_step = w->dense_step;
    CHECK(other.sequence != sequence && other.step != step);
    CHECK(other.dense_sequence != dense_sequence && other.dense_step != dense_step);
    w->sequence = other.sequence;
    w->step = other.step;
    w->dense_sequence = other.dense_sequence;
    w->dense_step = other.dense_step;
    const char *sequences[] = {"fb_append", "fb_join", "fb_join_more", "fb_fork", "fb_truncate", "fb_length",
                               "fb_pages", "fb_digest", "fb_read_row", "fb_landing_slot", "fb_publish",
                               "fb_layer", "fb_layers", "fb_resolve", "fb_gather", "fb_scatter",
                               "fb_overlap", "fb_close", "fb_finish", "fb_abandon", "fb_append_in_place",
                               "fb_scatter_range", "fb_overlap_steps", "fb_resize", "fb_budgets",
                               "fb_extend", "fb_park", "fb_resume",
                               "fb_dense_extend", "fb_dense_fork", "fb_dense_truncate", "fb_dense_length",
                               "fb_dense_pages", "fb_dense_close", "fb_dense_publish", "fb_dense_prepare",
                               "fb_dense_finish", "fb_dense_abandon", "fb_dense_arrived",
                               "fb_dense_park", "fb_dense_resume"};
    uint32_t made = 0;
    for (uint32_t index = 0; index < CALL_COUNT; index++) {
        for (size_t at = 0; at < sizeof sequences / sizeof sequences[0]; at++) {
            if (strcmp(CALLS[index].name, sequences[at]) == 0) {
                refused(w, &CALLS[index], handle_of(w, CALLS[index].on), 0, FB_CLOSED);
                made++;
            }
        }
    }
    CHECK(made == sizeof sequences / sizeof sequences[0]);
    w->sequence = sequence;
    w->step = step;
    w->dense_sequence = dense_sequence;
    w->dense_step = dense_step;
    end_world(&other);
}

int main(void) {
    world *w = (world *)calloc(1, sizeof *w);
    CHECK(w != NULL);
    make_world(w);
    ended(w);
    nulls(w);
    wrong_kinds(w);
    invented(w);
    foreign(w);
    end_world(w);
    free(w);
    return checked();
}
