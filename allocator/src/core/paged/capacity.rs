//! How much memory the device can give this allocator in all, as far as that is known. Others may
//! take memory at any time, so what the device answers is good for a number of questions only.

/// For so many plans one answer of the device is good.
const GOOD_FOR: u32 = 16;

/// The most bytes that may be held, and for how many more plans that is good.
#[derive(Debug, Default)]
pub(crate) struct Capacity {
    bytes: u64,
    pub(crate) good_for: u32,
}

impl Capacity {
    /// Notes that no more than so many bytes can be held now.
    pub(crate) fn set(&mut self, bytes: u64) {
        *self = Capacity { bytes, good_for: GOOD_FOR };
    }

    /// Bytes that the device can give beyond those that are held; no limit if that is not known.
    pub(crate) fn left(&mut self, held: u64) -> u64 {
        let Some(fewer) = self.good_for.checked_sub(1) else { return u64::MAX };
        self.good_for = fewer;
        self.bytes.saturating_sub(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_good_for_a_while() {
        let mut capacity = Capacity::default();
        assert_eq!(capacity.left(0), u64::MAX, "not known");
        capacity.set(100);
        assert_eq!([40, 100, 120].map(|held| capacity.left(held)), [60, 0, 0]);
        (3..GOOD_FOR).for_each(|_| assert_eq!(capacity.left(0), 100));
        assert_eq!((capacity.left(0), capacity.good_for), (u64::MAX, 0), "the device has to be asked again");
    }
}
