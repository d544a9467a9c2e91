/* One team of threads that lives as long as its owner. A job is run by the caller and by whichever members come in time.
 *
 * A job is a sequence of loops that every member walks through with its own `member`. The items of a loop are claimed in
 * pieces; a loop is over when its items are done, not when everybody has come: a member that the machine holds up holds up
 * nobody unless it has an item in hand, and when it comes late it finds the loops over and walks on. Which member computes what is
 * never part of a result: items are outputs, and an output is computed from its own inputs alone. Between loops a job only
 * reads. Whoever waits spins for a moment and then sleeps, so a busy machine gets its processors back. */

#ifndef ONEDRAW_TEAM_H
#define ONEDRAW_TEAM_H

typedef struct team team;
typedef struct {
    team *of;
    int index, count; /* 0 is the caller */
    long loop;        /* how many loops it has left behind */
} member;
typedef void (*job)(const void *argument, member *m);

team *onedraw_team_new(int count);
void onedraw_team_free(team *t);
/* alone: too little work to wake anybody. Returns when all loops are over and nobody is inside the job any more. */
void onedraw_team_run(team *t, job function, const void *argument, int alone);

long onedraw_team_claim(member *m, long total, long piece); /* the first of up to `piece` items; negative: none is left */
void onedraw_team_done(member *m, long items, long total);
void onedraw_team_leave(member *m); /* wait until the loop is over */

/* Items 0 … total - 1, claimed in pieces. */
#define SHARE(m, total, piece, i, ...)                                                                              \
    do {                                                                                                            \
        long share_total = (total), share_piece = (piece);                                                          \
        for (long share_at; (share_at = onedraw_team_claim(m, share_total, share_piece)) >= 0;) {                   \
            long share_end = share_at + share_piece < share_total ? share_at + share_piece : share_total;           \
            for (long i = share_at; i < share_end; i++) __VA_ARGS__                                                 \
            onedraw_team_done(m, share_end - share_at, share_total);                                                \
        }                                                                                                           \
        onedraw_team_leave(m);                                                                                      \
    } while (0)

#endif
