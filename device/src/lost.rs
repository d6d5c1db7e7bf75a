//! The error by which a device was lost.
//!
//! Work that fails on a device makes no call fail at once. The first call that the driver answers afterwards reports the failure,
//! and from then on all calls do. So the first error is the most informative one, and later errors refer to it.

use std::fmt;
use std::sync::OnceLock;

use crate::driver::DeviceInfo;
use crate::error::{DeviceError, Operation};
use crate::label::DeviceLabel;

/// The first error that said that a device is lost.
#[derive(Debug, Default)]
pub(crate) struct Lost(OnceLock<DeviceError>);

impl Lost {
    /// That error, if there was one.
    pub(crate) fn first(&self) -> Option<&DeviceError> {
        self.0.get()
    }

    /// Remembers an error of a lost device if it is the first, and lets a later one tell of the first.
    #[cold]
    pub(crate) fn note(&self, error: DeviceError, info: &DeviceInfo) -> DeviceError {
        let mut is_first = false;
        let first = self.0.get_or_init(|| {
            is_first = true;
            error.clone()
        });
        if is_first { error } else { error.with_more(before(first.operation, first.code.name(), info)) }
    }
}

/// Logs that something could not be given back. That is a warning, unless the device is lost: then everything goes with it, and an error
/// has told of the loss.
pub(crate) fn log_kept(error: &DeviceError, what: impl fmt::Display) {
    if error.is_device_lost() {
        tracing::debug!(%error, "{what}");
    } else {
        tracing::warn!(%error, "{what}");
    }
}

fn before(operation: Operation, code: &str, info: &DeviceInfo) -> String {
    format!("{} was lost before: {operation} reported {code}", DeviceLabel::from(info))
}
