/*-------------------------------------------------------------------------
 *
 * journal.h
 *	  What journal.c has rows.c write.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_JOURNAL_H
#define DLOCK_JOURNAL_H

#include "dlock.h"

/* A row, as it is to be */
typedef struct DlockImage
{
	DlockRecord *record;		/* referred to */
	uint64		mark;
	bool		had_row;
	bool		over;			/* to be removed, and finished then */
	bool		granted;
	bool		delayed;		/* of a lease */
	TimestampTz granted_at;
	char		channel[NAMEDATALEN];
} DlockImage;

/* rows.c */
extern bool dlock_rows_begin(DlockSpace *space);
extern int	dlock_rows_write(const DlockImage *images, int count);
extern bool dlock_rows_remove_foreign(DlockSpace *space);
extern void dlock_rows_commit(void);

#endif							/* DLOCK_JOURNAL_H */
