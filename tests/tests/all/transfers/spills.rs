//! Steps with buffers that may be spilled: handed over, spilled on request or because memory runs
//! out, used, checked.

use aquifer::Pending;
use aquifer::memory::AllocError;

use super::pattern;
use super::world::{Begun, World, differ, pick};

/// More than is free on the device beside any buffer, and not more than it has.
const PRESSURE_BYTES: u64 = 255 << 20;

impl World {
    /// Hands a buffer over. Transfers that were begun with it may still be under way.
    pub(super) fn keep(&mut self, device: usize) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = self.devices.swap_remove(device);
        if let Some(spillable) = self.done(self.spiller.add(buffer, 0)) {
            self.spillable.push((spillable, content));
        }
    }

    /// Spills one buffer.
    pub(super) fn spill(&mut self, index: usize) {
        let Some(index) = pick(&self.spillable, index) else { return };
        self.done(self.spillable[index].0.spill());
    }

    /// Asks for more memory than is free, so that the allocator asks the spiller.
    pub(super) fn pressure(&mut self) {
        match self.bench.transfer.allocator().alloc_bytes(PRESSURE_BYTES, &self.streams[0]) {
            Ok(_) | Err(AllocError::OutOfMemory { .. }) => {}
            Err(error) => assert!(self.faults, "{error}"),
        }
    }

    /// Uses a buffer: writes it, or reads it back.
    pub(super) fn access(&mut self, index: usize, seed: Option<u64>, stream: usize) {
        let Some(index) = pick(&self.spillable, index) else { return };
        let transfer = self.bench.transfer.clone();
        let (spillable, content) = &mut self.spillable[index];
        let begun = match (spillable.access(&self.streams[stream]), seed) {
            (Ok(mut access), Some(seed)) => {
                let bytes = pattern(seed, access.len());
                let begun = transfer.upload(bytes.clone(), access.buffer_mut());
                *content = (begun.is_ok() && !self.faults).then_some(bytes);
                begun.map(Begun::Nothing)
            }
            (Ok(access), None) => transfer.to_vec(&access).map(|begun| Begun::Bytes(begun, content.clone())),
            (Err(error), _) => Err(error),
        };
        self.begin(begun);
    }

    /// Compares all of them, wherever they are.
    pub(super) fn check_spillable(&mut self) {
        for (number, (spillable, content)) in self.spillable.iter().enumerate() {
            let access = self.done(spillable.access(&self.streams[0])).unwrap();
            let bytes = self.done(self.bench.transfer.to_vec(&access).and_then(Pending::wait));
            assert!(!differ(bytes.as_deref(), content), "spillable memory {number} differs");
        }
    }
}
