//! Replays recorded programs to an allocator.
//!
//! Before the clock starts, a program is converted to a list of events whose blocks live in
//! numbered slots. So what is timed is a match, access to a slot, and the allocator.

use std::time::{Duration, Instant};

use crate::exit::{Context, Failure};
use crate::input::{Event, Program};
use crate::subject::{Refused, Subject};

/// One program and the slots of its blocks.
#[derive(Debug)]
pub struct Player<'a, S: Subject> {
    program: &'a Program,
    slots: Vec<Option<S::Handle>>,
}

/// What came of one pass through a program.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Pass {
    /// How long it took.
    pub elapsed: Duration,
    /// Requests refused for lack of memory. Their slots stayed empty, and what else happens to them
    /// was skipped.
    pub ooms: u64,
}

/// What to do when a request is refused for lack of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnOom {
    /// Go on without the block.
    Skip,
    /// End the pass.
    Stop,
}

impl<'a, S: Subject> Player<'a, S> {
    /// A player for `program`.
    pub fn new(program: &'a Program) -> Player<'a, S> {
        Player { program, slots: (0..program.slots).map(|_| None).collect() }
    }

    /// Plays the program once. What it leaves allocated is freed when the clock has stopped.
    ///
    /// # Errors
    /// When the allocator fails for another reason than lack of memory.
    pub fn pass(&mut self, subject: &mut S, on_oom: OnOom) -> Result<Pass, Failure> {
        let start = Instant::now();
        let played = self.play(subject, on_oom);
        let elapsed = start.elapsed();
        self.slots.iter_mut().filter_map(Option::take).for_each(|handle| subject.free(handle));
        Ok(Pass { elapsed, ooms: played? })
    }

    /// Plays the program once and leaves its blocks allocated for as long as the player lives.
    /// Tells how many requests were refused for lack of memory.
    ///
    /// # Errors
    /// As [`Player::pass`].
    pub fn play(&mut self, subject: &mut S, on_oom: OnOom) -> Result<u64, Failure> {
        let mut ooms = 0;
        let slots = &mut self.slots[..];
        for (index, event) in self.program.events.iter().enumerate() {
            let refused = match *event {
                Event::Alloc { slot, bytes, stream } => match subject.alloc(bytes, stream) {
                    Ok(handle) => {
                        slots[slot as usize] = Some(handle);
                        continue;
                    }
                    Err(refused) => refused,
                },
                Event::Free { slot } => {
                    if let Some(handle) = slots[slot as usize].take() {
                        subject.free(handle);
                    }
                    continue;
                }
                Event::RecordStream { slot, stream } => match &mut slots[slot as usize] {
                    Some(handle) => match subject.record_stream(handle, stream) {
                        Ok(()) => continue,
                        Err(refused) => refused,
                    },
                    None => continue,
                },
                Event::Iteration(_) => continue,
            };
            ooms += 1;
            match refused {
                Refused::OutOfMemory if on_oom == OnOom::Skip => {}
                Refused::OutOfMemory => break,
                Refused::Failed(error) => {
                    let context = Context::Event { index };
                    return Err(match *error {
                        Failure::Alloc { error, .. } => Failure::Alloc { context, error },
                        other => other,
                    });
                }
            }
        }
        Ok(ooms)
    }
}

/// Time per operation of each pass, in ns, and of all passes.
#[derive(Debug, Clone, Default)]
pub struct Times {
    per_operation: Vec<f64>,
    all: Duration,
}

impl Times {
    /// Adds a pass of `operations` operations. One without any has no time an operation, and is
    /// left out.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52, and a rounded one would do")]
    pub fn add(&mut self, elapsed: Duration, operations: u64) {
        self.all += elapsed;
        if operations > 0 {
            self.per_operation.push(elapsed.as_nanos() as f64 / operations as f64);
        }
    }

    /// The first pass; `None` if there was none.
    pub fn first(&self) -> Option<f64> {
        self.per_operation.first().copied()
    }

    /// The median of the passes after the first; the first if it is the only one.
    pub fn later(&self) -> Option<f64> {
        if self.per_operation.len() > 1 { Some(median(&self.per_operation[1..])) } else { self.first() }
    }

    /// The median of all passes; 0 if there was none.
    pub fn median(&self) -> f64 {
        median(&self.per_operation)
    }

    /// All passes together.
    pub fn all(&self) -> Duration {
        self.all
    }
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
