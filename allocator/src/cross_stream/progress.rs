//! How far streams got: what is asked of the driver, or waited for, so that memory becomes free.
//!
//! Asking may record an event, and both call the driver, so neither happens under a lock of the
//! allocator. A stream that cannot be asked now is skipped: its memory becomes free later.

use std::sync::Arc;

use aquifer_device::internal::Timeline;
use aquifer_device::{DeviceError, ErrorKind};

use crate::error::AllocError;
use crate::types::After;

/// Asks how far streams got. Skips streams that cannot be asked now.
pub(crate) fn poll(pending: &[(Arc<Timeline>, After)]) -> Result<(), AllocError> {
    for (timeline, after) in pending {
        let n = after.last_tick();
        match timeline.cover(n).and_then(|()| timeline.is_done(n)) {
            Ok(_) => {}
            Err(error) if cannot_be_asked(&error) => {
                tracing::debug!(%error, stream = timeline.id(), "a stream could not be asked how far it got");
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits on the host until the given work is done. Skips streams that cannot be waited for now.
pub(crate) fn synchronize_all(pending: &[(Arc<Timeline>, After)]) -> Result<(), AllocError> {
    for (timeline, after) in pending {
        match timeline.synchronize(after.last_tick()) {
            Err(error) if !cannot_be_asked(&error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

/// True if the error only means that a stream cannot be asked or waited for now: it captures, or it
/// is gone without a last event.
pub(crate) fn cannot_be_asked(error: &DeviceError) -> bool {
    matches!(error.kind, ErrorKind::Capture | ErrorKind::InvalidUse)
}
