//! The devices of the process by context, so that a context has one device.
//!
//! The registry holds weak references only: the last handle of a device closes it, and a later
//! request opens a new one. The device keeps its context alive, so a handle of a context cannot
//! mean another context while the device is there.
//!
//! Locks: the list's is a leaf. That of a context's place is held while its device is opened, so
//! that threads which open it at the same time get one device; those that open another GPU do not
//! wait. No code of callers runs under either.

use std::sync::{Arc, Weak};

use crate::fork::Mutex;

use super::driver::CudaDriver;
use crate::device::{self, Device};
use crate::error::Result;
use crate::unfinished;

/// The device of one context.
type Place = Mutex<Weak<device::DeviceInner>>;

static PLACES: Mutex<Vec<(u64, Arc<Place>)>> = Mutex::new(Vec::new());

/// The device of a context. If there is none, `open` opens the driver for one.
pub(super) fn device_in(context: u64, open: impl FnOnce() -> Result<Arc<CudaDriver>>) -> Result<Device> {
    // Before the lock, because this may run code of callers.
    unfinished::finish_all();
    let place = place(context);
    let mut known = place.lock();
    if let Some(device) = Device::upgrade(&known) {
        return Ok(device);
    }
    let device = Device::of_driver(open()?);
    *known = device.downgrade();
    Ok(device)
}

/// The place of a context's device. Forgets places that no device and no thread uses.
fn place(context: u64) -> Arc<Place> {
    let mut places = PLACES.lock();
    places.retain(|(_, place)| {
        Arc::strong_count(place) > 1 || place.try_lock().is_none_or(|device| device.strong_count() > 0)
    });
    if let Some((_, place)) = places.iter().find(|(known, _)| *known == context) {
        return place.clone();
    }
    let place = Arc::<Place>::default();
    places.push((context, place.clone()));
    place
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimConfig, SimDriver};

    #[test]
    fn places_without_a_device_are_forgotten() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        // No context has such a handle.
        let [used, unused] = [3, 5];
        *place(used).lock() = device.downgrade();
        drop(place(unused));
        assert!(Device::upgrade(&place(used).lock()).is_some_and(|same| same.id() == device.id()));
        let is_known = |context| PLACES.lock().iter().any(|(known, _)| *known == context);
        assert!(is_known(used) && !is_known(unused));
        drop(device);
        drop(place(unused));
        assert!(!is_known(used));
    }
}
