//! Generated workloads: blocks of random sizes that are replaced at random.

use aquifer_trace::Random;
use aquifer_trace::{Refused, Subject};

/// A log-uniform range of block sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    least: u64,
    most: u64,
}

impl Sizes {
    /// From `least`, above 0, to `most`.
    pub(crate) const fn between(least: u64, most: u64) -> Sizes {
        Sizes { least, most }
    }

    /// The largest size.
    pub(crate) const fn most(self) -> u64 {
        self.most
    }

    /// The mean size.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "sizes are far below 2^52, and a rounded mean would do"
    )]
    pub(crate) fn mean(self) -> u64 {
        let (least, most) = (self.least as f64, self.most as f64);
        if self.least == self.most { self.least } else { ((most - least) / (most / least).ln()) as u64 }
    }

    /// The same, without the largest sizes as far as needed for `live` blocks to fit in `bytes`.
    #[must_use]
    pub(crate) fn within(mut self, bytes: u64, live: u32) -> Sizes {
        while self.most / 2 >= self.least && self.mean().saturating_mul(live.into()) > bytes {
            self.most /= 2;
        }
        self
    }

    fn draw(self, random: &mut Random) -> u64 {
        if self.least == self.most { self.least } else { random.size(self.least, self.most) }
    }
}

/// Replacements of blocks, drawn before the clock starts: the blocks at the start, and a round of
/// replacements.
#[derive(Debug)]
pub(crate) struct Replacements {
    random: Random,
    sizes: Sizes,
    start: Vec<u64>,
    steps: Vec<(u32, u64)>,
}

impl Replacements {
    /// A workload that keeps `live` blocks live.
    pub(crate) fn new(seed: u64, sizes: Sizes, live: u32) -> Replacements {
        let mut random = Random::new(seed);
        let start = (0..live).map(|_| sizes.draw(&mut random)).collect();
        Replacements { random, sizes, start, steps: Vec::new() }
    }

    /// Draws the next round.
    pub(crate) fn draw(&mut self, pairs: u32) {
        let Replacements { random, sizes, start, steps } = self;
        let live = u32::try_from(start.len()).unwrap_or(u32::MAX);
        steps.clear();
        steps.extend((0..pairs).map(|_| (random.below(live), sizes.draw(random))));
    }

    /// The sizes of the round's blocks.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.steps.iter().map(|&(_, bytes)| bytes)
    }
}

/// Unused bytes after the handles of each subject. Handles of two threads must not share a cache
/// line or two adjacent ones, or the threads wait for each other's writes.
const APART: usize = 256;

/// A subject and its live blocks, on cache lines of their own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Replacer<S: Subject> {
    subject: S,
    live: Vec<Option<S::Handle>>,
}

impl<S: Subject> Replacer<S> {
    /// Allocates the blocks at the start.
    pub(crate) fn start(mut subject: S, round: &Replacements) -> Result<Replacer<S>, Refused> {
        let mut live = Vec::with_capacity(round.start.len() + APART.div_ceil(size_of::<Option<S::Handle>>().max(1)));
        for &bytes in &round.start {
            live.push(Some(subject.alloc(bytes, 0)?));
        }
        Ok(Replacer { subject, live })
    }

    /// Replaces one block after the other.
    pub(crate) fn round(&mut self, round: &Replacements) -> Result<(), Refused> {
        for &(victim, bytes) in &round.steps {
            let place = &mut self.live[victim as usize];
            if let Some(handle) = place.take() {
                self.subject.free(handle);
            }
            *place = Some(self.subject.alloc(bytes, 0)?);
        }
        Ok(())
    }

    /// Frees all blocks.
    pub(crate) fn leave(mut self) {
        self.live.into_iter().flatten().for_each(|handle| self.subject.free(handle));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fit_the_device() {
        let sizes = Sizes::between(512, 64 << 20);
        assert!((5 << 20..6 << 20).contains(&sizes.mean()));
        assert_eq!(sizes.within(1 << 40, 100).most, 64 << 20);
        assert!(sizes.within(1 << 30, 10_000).mean() * 10_000 <= 1 << 30);
        assert_eq!(sizes.within(0, 100).most, 512);
        assert_eq!(Sizes::between(7, 7).within(0, 1).mean(), 7);
    }

    #[test]
    fn replacements_are_repeatable() {
        let [mut one, mut two] = [7, 7].map(|seed| Replacements::new(seed, Sizes::between(512, 4096), 10));
        one.draw(100);
        two.draw(100);
        assert_eq!((&one.start, &one.steps), (&two.start, &two.steps));
        assert!(one.steps.iter().all(|&(victim, bytes)| victim < 10 && (512..=4096).contains(&bytes)));
    }
}
