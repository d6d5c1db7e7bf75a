//! Routes between devices.

use std::fmt;

use aquifer_device::Stream;

use crate::error::TransferError;
use crate::pending::OnStreams;

/// The route of a copy from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Both ends are on one device.
    Same,
    /// From device to device, over their link.
    Peer,
    /// From device to device by the driver, which goes by way of the host as the devices cannot
    /// reach each other.
    Staged,
    /// By way of page-locked memory of this crate, as the devices have different drivers. Waits on
    /// the host for the first half.
    ViaHost,
}

impl OnStreams for Route {
    fn ready_on(&self, _stream: &Stream) -> Result<(), TransferError> {
        Ok(())
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Route::Same => "on one device",
            Route::Peer => "from device to device",
            Route::Staged => "from device to device, staged by the driver",
            Route::ViaHost => "by way of the host",
        })
    }
}
