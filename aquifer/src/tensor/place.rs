//! Places of tensors: the host, pinned or not, and devices.

use std::fmt;
use std::panic::Location;

use aquifer_device::internal::CalledFrom;
use aquifer_device::{Device, Stream};
use aquifer_transfer::PinnedPool;

use crate::allocator::Allocator;
use crate::error::Error;
use crate::transfer::Transfer;

/// The memory that a tensor is in, or goes to.
///
/// | argument | place |
/// | --- | --- |
/// | [`Place::Host`] | ordinary host memory |
/// | `&pool` | pinned memory of a [`PinnedPool`] |
/// | `&memory` | memory of an [`Allocator`] |
/// | `(&memory, &stream)` | the same, by copies on the stream |
/// | `&device` | memory of the process's allocator of a [`Device`] |
/// | `&transfer` | memory of the allocator of a [`Transfer`], by copies with its settings |
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::tensor::Place;
/// let memory = Allocator::of(&aquifer::open("sim:24GiB")?)?;
/// let (on_device, pinned) = (Place::try_from(&memory)?, Place::from(memory.transfer()?.pinned()));
/// assert_eq!((on_device.to_string(), pinned.to_string()), ("sim:0".to_owned(), "pinned cpu".to_owned()));
/// assert!(Place::Host.is_host() && pinned.is_host());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub enum Place {
    /// Ordinary host memory.
    Host,
    /// Pinned host memory of a pool, for copies to and from its device.
    Pinned(PinnedPool),
    /// Memory of a device. Copies there run on the stream of the [`Transfer`], if it has one
    /// ([`Transfer::on`]).
    Device(Transfer),
}

impl From<&Transfer> for Place {
    fn from(transfer: &Transfer) -> Place {
        Place::Device(transfer.clone())
    }
}

impl TryFrom<&Allocator> for Place {
    type Error = Error;

    fn try_from(memory: &Allocator) -> Result<Place, Error> {
        Ok(Place::Device(memory.transfer()?))
    }
}

impl TryFrom<(&Allocator, &Stream)> for Place {
    type Error = Error;

    fn try_from((memory, stream): (&Allocator, &Stream)) -> Result<Place, Error> {
        Ok(Place::Device(memory.transfer()?.on(stream)?))
    }
}

impl TryFrom<&Device> for Place {
    type Error = Error;

    fn try_from(device: &Device) -> Result<Place, Error> {
        Place::try_from(&Allocator::of(device)?)
    }
}

impl From<&PinnedPool> for Place {
    fn from(pool: &PinnedPool) -> Place {
        Place::Pinned(pool.clone())
    }
}

impl From<&Place> for Place {
    fn from(place: &Place) -> Place {
        place.clone()
    }
}

impl Place {
    /// The place that an argument names.
    pub(crate) fn named(by: impl TryInto<Place, Error: Into<Error>>) -> Result<Place, Error> {
        by.try_into().map_err(Into::into)
    }

    /// Whether it is on the host, pinned or not.
    pub fn is_host(&self) -> bool {
        !matches!(self, Place::Device(_))
    }

    /// Whether it is pinned host memory.
    pub fn is_pinned(&self) -> bool {
        self.pool().is_some()
    }

    /// The device, if it is on one.
    pub fn device(&self) -> Option<&Device> {
        match self {
            Place::Device(transfer) => Some(transfer.device()),
            _ => None,
        }
    }

    /// The pool, if it is pinned host memory.
    pub(crate) fn pool(&self) -> Option<&PinnedPool> {
        match self {
            Place::Pinned(pool) => Some(pool),
            Place::Host | Place::Device(_) => None,
        }
    }

    /// As [`Transfer::called_here`], where it is on a device.
    #[track_caller]
    pub(crate) fn called_here(&self) -> Option<CalledFrom> {
        self.device()?.called_from(Location::caller())
    }

    /// Whether both are the same kind of host memory, or the same device.
    pub fn is_same(&self, other: &Place) -> bool {
        self.serves_as(other) && other.serves_as(self)
    }

    /// Whether a tensor in this place needs no move to the other one. Pinned memory counts as
    /// host memory, too; from host to pinned memory a copy is needed.
    pub fn serves_as(&self, wanted: &Place) -> bool {
        match (self, wanted) {
            (Place::Device(own), Place::Device(wanted)) => own.device().id() == wanted.device().id(),
            (Place::Pinned(own), Place::Pinned(wanted)) => own.device().id() == wanted.device().id(),
            (own, Place::Host) => own.is_host(),
            _ => false,
        }
    }
}

/// `cpu`, `pinned cpu`, `cuda:0` or `sim:0`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("cpu"),
            Place::Pinned(_) => f.write_str("pinned cpu"),
            Place::Device(transfer) => f.write_str(&device_name(transfer.device())),
        }
    }
}

/// A device's name among places: its kind and ordinal.
pub(crate) fn device_name(device: &Device) -> String {
    let info = device.info();
    format!("{}:{}", info.kind, info.ordinal)
}
