//! Tickets: the completion of work that the library enqueued by itself.
//!
//! A ticket is an object of its own, which outlives its cache and its device. Reading its outcome never waits. A failed
//! device ends its tickets only when a call queries it, so a pending ticket queries its device.

use forebay::device::{Event, Outcome, Ticket};

use crate::cast::{self, Out};
use crate::device::{Door, Tenant};
use crate::handle::{self, Object, Reserved, read};
use crate::status::FbStatus;
use forebay::Result;

/// The work has not ended.
pub const FB_TICKET_PENDING: u32 = 0;
/// The work has succeeded. Only this outcome makes its bytes valid.
pub const FB_TICKET_DONE: u32 = 1;
/// The work failed.
pub const FB_TICKET_FAILED: u32 = 2;
/// The work never ran, because its device has ended.
pub const FB_TICKET_CANCELLED: u32 = 3;

/// The completion of work that the library enqueued: a warm-up, a resume, index keys that are placed, the copy of a
/// fork, a truncation, the copies of fb_dense_park, the pages that fb_dense_open_shared or fb_dense_resume bring back,
/// or those of fb_dense_arrive and fb_dense_join.
#[derive(Debug)]
pub struct FbTicket {
    ticket: Ticket,
    door: Door,
    asked: Event,
}

impl Object for FbTicket {
    const KIND: u8 = 3;
    const NAME: &'static str = "fb_ticket";
}

impl FbTicket {
    fn outcome(&self) -> (u32, FbStatus) {
        if self.ticket.poll().is_none() {
            // The ticket has the result.
            self.door.with(|device| drop(device.query(self.asked)));
        }
        match self.ticket.poll() {
            None => (FB_TICKET_PENDING, FbStatus::FbOk),
            Some(Outcome::Done) => (FB_TICKET_DONE, FbStatus::FbOk),
            Some(Outcome::Failed(kind)) => (FB_TICKET_FAILED, kind.into()),
            Some(Outcome::Cancelled) => (FB_TICKET_CANCELLED, FbStatus::FbCancelled),
        }
    }
}

/// Where a ticket is written, if the caller wants one. Its place in the handle table is reserved before the work is
/// enqueued, so that giving the ticket cannot fail afterwards.
pub(crate) struct Wanted<'a>(Option<(Out<'a, *mut FbTicket>, Reserved)>);

/// # Safety
/// `ticket` is null, or has room for the result during `'a`.
pub(crate) unsafe fn wanted<'a>(ticket: *mut *mut FbTicket) -> Result<Wanted<'a>> {
    if ticket.is_null() {
        return Ok(Wanted(None));
    }
    // SAFETY: the same contract.
    let out = unsafe { cast::out(ticket, "ticket") }?;
    Ok(Wanted(Some((out, handle::reserve()?))))
}

impl Wanted<'_> {
    pub(crate) fn give(self, ticket: Ticket, tenant: &Tenant) {
        if let Some((out, place)) = self.0 {
            let (door, asked) = (tenant.door.clone(), tenant.asked);
            out.set(place.fill(FbTicket { ticket, door, asked }));
        }
    }
}

/// Returns the state of a ticket's work: FB_TICKET_PENDING, FB_TICKET_DONE, FB_TICKET_FAILED or FB_TICKET_CANCELLED.
/// `status`, which may be NULL, receives the error of failed work; otherwise FB_OK, or FB_CANCELLED for cancelled work.
///
/// # Safety
/// `outcome` has room for the result; `status` is NULL or has room for one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_ticket_outcome(
    ticket: *const FbTicket,
    outcome: *mut u32,
    status: *mut u32,
) -> FbStatus {
    // SAFETY: this call's contract, for both.
    unsafe {
        read(ticket, |ticket| {
            let (outcome, status) = (cast::out(outcome, "outcome")?, cast::out_or_none(status, "status")?);
            let (now, why) = ticket.outcome();
            outcome.set(now);
            if let Some(status) = status {
                status.set(why as u32);
            }
            Ok(())
        })
    }
}

/// Destroys a ticket, whether or not its work has ended. The work continues.
///
/// # Safety
/// Nothing beyond the conventions at the top of the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fb_ticket_destroy(ticket: *mut FbTicket) -> FbStatus {
    handle::end(ticket, |_| Ok(()))
}
