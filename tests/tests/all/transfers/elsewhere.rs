//! Steps with buffers elsewhere: spilled on request or because memory runs out, or on a second
//! device.

use aquifer::memory::AllocError;
use aquifer_tests::random::pattern;

use super::interpreter::{Begun, Interpreter, differ, pick};
use super::to_vec;

/// More than is free on the device with any buffer live, and not more than it has.
const PRESSURE_BYTES: u64 = 255 << 20;

impl Interpreter {
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
                let begun = access.buffer_mut().upload(bytes.clone(), &transfer);
                *content = (begun.is_ok() && !self.faults).then_some(bytes);
                begun.map(Begun::Nothing)
            }
            (Ok(access), None) => to_vec(&transfer, &access).map(|begun| Begun::Bytes(begun, content.clone())),
            (Err(error), _) => Err(error),
        };
        self.begin(begun);
    }

    /// Compares all of them, wherever they are.
    pub(super) fn check_spillable(&mut self) {
        for (number, (spillable, content)) in self.spillable.iter().enumerate() {
            let access = self.done(spillable.access(&self.streams[0])).unwrap();
            let bytes = self.done(access.to_vec(&self.bench.transfer));
            assert!(!differ(bytes.as_deref(), content), "spillable memory {number} differs");
        }
    }

    /// Copies a buffer to a new one on the other device.
    pub(super) fn send_to_peer(&mut self, device: usize) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (source, content) = (self.devices[device].0.share(), self.devices[device].1.clone());
        let mut target = self.peer.alloc_zeroed(source.bytes());
        let begun = self.peer.transfer.copy(&source, &mut target);
        let known = begun.is_ok().then_some(content).flatten();
        self.on_peer.push((target, known));
        self.begin(begun.map(|begun| Begun::Nothing(begun.map(|_| ()))));
    }

    /// Copies a buffer of the other device to one of the same length.
    pub(super) fn fetch_from_peer(&mut self, peer: usize, device: usize) {
        let Some(peer) = pick(&self.on_peer, peer) else { return };
        let (source, bytes) = (self.on_peer[peer].0.share(), self.on_peer[peer].1.clone());
        let fitting: Vec<usize> =
            (0..self.devices.len()).filter(|&index| self.devices[index].0.len() == source.len()).collect();
        let Some(device) = pick(&fitting, device).map(|index| fitting[index]) else { return };
        let (target, content) = &mut self.devices[device];
        let begun = self.bench.transfer.copy(&source, target);
        *content = begun.is_ok().then_some(bytes).flatten();
        self.begin(begun.map(|begun| Begun::Nothing(begun.map(|_| ()))));
    }

    pub(super) fn check_peer(&mut self, index: usize) {
        let (buffer, content) = &self.on_peer[index];
        let bytes = self.done(buffer.to_vec(&self.peer.transfer));
        assert!(!differ(bytes.as_deref(), content), "memory {index} of the other device differs");
    }
}
