//! The operations that the host knows to be complete. All threads of the program together count as
//! one host, which may learn from one device about another.
//!
//! Every device has a [`Ledger`] of its own work. Devices that interacted share theirs: a clock
//! names streams of a device only where that device's ledger is at hand, so that knowledge from
//! waiting on one device counts on all of them at once.
//!
//! Locks: a ledger's is a leaf. It is the only lock of one device that is taken under another
//! one's.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use aquifer_device::fork::Mutex;

use crate::clock::{OpClock, StreamKey};

/// Devices numbered so far.
static DEVICES: AtomicU32 = AtomicU32::new(0);

/// The host's knowledge of one device's work.
#[derive(Debug, Default)]
struct Ledger(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    /// Operation number by stream, up to which all is complete. Streams are never renumbered.
    complete: Vec<u64>,
    /// The device is lost or gone: pending work never happens.
    over: bool,
}

impl Ledger {
    fn knows(&self, stream: u32, seq: u64) -> bool {
        let entries = self.0.lock();
        entries.over || entries.complete.get(stream as usize).is_some_and(|&complete| complete >= seq)
    }

    fn raise(&self, stream: u32, seq: u64) {
        let complete = &mut self.0.lock().complete;
        let index = stream as usize;
        if complete.len() <= index {
            complete.resize(index + 1, 0);
        }
        complete[index] = complete[index].max(seq);
    }
}

/// The host's knowledge, as far as one device has it.
#[derive(Debug)]
pub(crate) struct Known {
    /// Number of the device, never reused in this process.
    pub(crate) device: u32,
    own: Arc<Ledger>,
    peers: Peers,
}

/// The ledgers of devices by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peers(BTreeMap<u32, Arc<Ledger>>);

impl Known {
    /// Nothing, of a device with a new number.
    pub(crate) fn new() -> Self {
        let device = DEVICES.fetch_add(1, Ordering::Relaxed);
        Known { device, own: Arc::default(), peers: Peers::default() }
    }

    fn ledger(&self, device: u32) -> Option<&Ledger> {
        if device == self.device { Some(&self.own) } else { self.peers.0.get(&device).map(|ledger| &**ledger) }
    }

    /// Whether the host knows that operation `seq` of a stream is complete.
    pub(crate) fn knows(&self, stream: StreamKey, seq: u64) -> bool {
        self.ledger(stream.device).is_some_and(|ledger| ledger.knows(stream.stream, seq))
    }

    /// The host learns that everything before `clock` is complete.
    pub(crate) fn learn(&self, clock: &OpClock) {
        for (stream, seq) in clock.iter() {
            if let Some(ledger) = self.ledger(stream.device) {
                ledger.raise(stream.stream, seq);
            }
        }
    }

    /// The device is lost or gone. Its work counts as complete, because the rest of it never
    /// happens.
    pub(crate) fn end(&self) {
        self.own.0.lock().over = true;
    }

    /// The ledgers of this device and of all that it met, for another one that is to meet them.
    pub(crate) fn all(&self) -> Peers {
        let mut all = self.peers.clone();
        all.0.insert(self.device, self.own.clone());
        all
    }

    /// Meets devices, so that clocks may name their streams here.
    pub(crate) fn meet(&mut self, devices: Peers) {
        let others = devices.0.into_iter().filter(|&(device, _)| device != self.device);
        self.peers.0.extend(others);
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.end();
    }
}
