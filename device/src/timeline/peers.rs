//! The ticks of other devices' streams that a stream is already ordered after.
//!
//! Unlike a [`super::Clock`], this is not passed on to streams that wait: if a stream waits for one that waited for another device, it
//! still has to wait for that device itself. Only the few streams that were waited for last are kept; one that was forgotten costs
//! another event and wait.

/// Number of streams of other devices that are kept: enough for some on each device of a machine.
const KEPT: usize = 32;

/// For each stream of another device, up to which tick everything is known to come before.
#[derive(Clone, Debug, Default)]
pub(super) struct Peers(
    /// A (device, stream) pair and a tick; the stream that was waited for last is at the end.
    Vec<((u32, u32), u64)>,
);

impl Peers {
    /// Ticks of the stream smaller than the result come before.
    pub(super) fn of(&self, stream: (u32, u32)) -> u64 {
        self.0.iter().find(|(known, _)| *known == stream).map_or(0, |&(_, n)| n)
    }

    /// Notes that every tick of the stream smaller than `n` comes before.
    pub(super) fn raise(&mut self, stream: (u32, u32), n: u64) {
        let n = n.max(self.of(stream));
        self.0.retain(|(known, _)| *known != stream);
        if self.0.len() == KEPT {
            self.0.remove(0);
        }
        self.0.push((stream, n));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_streams_met_last_are_kept_and_never_lowered() {
        let mut peers = Peers::default();
        peers.raise((7, 0), 9);
        peers.raise((7, 0), 4);
        assert_eq!((peers.of((7, 0)), peers.of((7, 1)), peers.of((0, 7))), (9, 0, 0));
        for stream in 0..40 {
            peers.raise((8, stream), 1);
            peers.raise((7, 0), 9);
        }
        assert_eq!((peers.0.len(), peers.of((7, 0)), peers.of((8, 39)), peers.of((8, 0))), (KEPT, 9, 1, 0));
    }
}
