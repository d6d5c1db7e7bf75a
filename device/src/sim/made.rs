//! Which simulated devices there are, by ordinal: those that the process has made so far. One whose
//! driver is dropped counts on, as a GPU does that no handle has open; so what was given access to
//! it stays valid.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use super::refused::{Answer, Refused};
use crate::error::Code;

static MADE: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

/// Notes that there is a device with this ordinal.
pub(super) fn note(ordinal: u32) {
    MADE.lock().insert(ordinal);
}

/// Refuses an ordinal that no device of the process has.
pub(super) fn check(ordinal: u32) -> Answer<()> {
    if MADE.lock().contains(&ordinal) {
        return Ok(());
    }
    Err(Refused::new(Code::INVALID_DEVICE, format!("there is no simulated device {ordinal}")))
}
