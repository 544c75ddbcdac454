/*-------------------------------------------------------------------------
 *
 * list.c
 *	  Doubly linked lists through the memory area.
 *
 * A list and its links are protected by the lock of what the list belongs to.
 * Nothing here raises an error, but for a segment of memory that cannot be
 * mapped, and that comes before any change.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/shared.h"

static DlockLink *
link_at(dsa_pointer pointer)
{
	return dsa_get_address(dlock_area, pointer);
}

void
dlock_list_append(DlockList *list, DlockLink *link)
{
	link->prev = list->tail;
	link->next = InvalidDsaPointer;
	if (DsaPointerIsValid(list->tail))
		link_at(list->tail)->next = link->self;
	else
		list->head = link->self;
	list->tail = link->self;
	list->length++;
}

void
dlock_list_remove(DlockList *list, DlockLink *link)
{
	/* before any change, as to map a segment of memory can fail */
	DlockLink  *prev = DsaPointerIsValid(link->prev) ? link_at(link->prev) : NULL;
	DlockLink  *next = DsaPointerIsValid(link->next) ? link_at(link->next) : NULL;

	if (prev)
		prev->next = link->next;
	else
		list->head = link->next;
	if (next)
		next->prev = link->prev;
	else
		list->tail = link->prev;
	link->prev = link->next = InvalidDsaPointer;
	list->length--;
}
