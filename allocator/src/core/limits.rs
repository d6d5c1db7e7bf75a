//! Memory that threads are about to take from the device, and what may refuse it.

/// What refused a growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The device has no such piece of memory.
    Device,
    /// The limit on the bytes held from the device.
    Limit,
    /// The bytes to be left free for libraries.
    Headroom,
    /// The device's address space.
    Addresses,
    /// The limit of the request's private pool ([`crate::PoolOptions::limit`]).
    PoolLimit,
}

/// Bytes that threads take from the device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Growing {
    /// By those that are about to.
    pub(crate) now: u64,
    /// By all, those included that are done.
    pub(crate) begun: u64,
}

impl Growing {
    pub(crate) fn begin(&mut self, bytes: u64) {
        self.now += bytes;
        self.begun = self.begun.wrapping_add(bytes);
    }

    /// Ends an attempt, successful or not; `reserved` now includes what was taken.
    pub(crate) fn end(&mut self, bytes: u64) {
        self.now -= bytes;
    }
}

/// What an allocator holds and takes at one moment.
#[derive(Clone, Copy, Default)]
pub(crate) struct Holding {
    /// Bytes, those on their way back to the device included.
    pub(crate) bytes: u64,
    pub(crate) growing: Growing,
}

impl Holding {
    /// The most that the allocator can have held at a moment between the two.
    pub(crate) fn most_until(&self, later: &Holding) -> u64 {
        let begun = later.growing.begun.wrapping_sub(self.growing.begun);
        self.bytes.max(later.bytes).saturating_add(self.growing.now).saturating_add(begun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_being_taken_counts_as_held() {
        let held = |bytes, now, begun| Holding { bytes, growing: Growing { now, begun } };
        assert_eq!(held(10, 0, 7).most_until(&held(10, 0, 7)), 10);
        assert_eq!(held(10, 5, 7).most_until(&held(15, 0, 7)), 20, "too much at most, never too little");
        assert_eq!(held(10, 0, 7).most_until(&held(10, 3, 10)), 13);
        assert_eq!(held(10, 0, 7).most_until(&held(0, 0, 7)), 10);
    }
}
