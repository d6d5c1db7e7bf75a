//! Steps with a second device: copies there and back.

use aquifer::Pending;

use super::world::{Begun, World, differ, pick};

impl World {
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
        let bytes = self.done(self.peer.transfer.to_vec(buffer).and_then(Pending::wait));
        assert!(!differ(bytes.as_deref(), content), "memory {index} of the other device differs");
    }
}
