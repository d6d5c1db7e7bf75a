//! Plays recorded programs to an allocator.
//!
//! Before the clock starts, a program is converted to a list of events whose blocks are in numbered
//! slots. So the timed code is a match, an access to a slot, and the allocator.

use std::time::{Duration, Instant};

use aquifer::Error;

use crate::input::{Event, Program};
use crate::subject::{Refusal, Refused, Subject};

/// One program and the slots of its blocks.
#[derive(Debug)]
pub struct Player<'a, S: Subject> {
    program: &'a Program,
    slots: Vec<Option<S::Handle>>,
}

/// A failure of an allocator, other than for lack of memory.
#[derive(Debug, thiserror::Error)]
#[error("{}{error}", event.map_or_else(String::new, |event| format!("event {event}: ")))]
pub struct PlayError {
    /// The event of the program, counted from 0 without header lines; `None` outside of it.
    pub event: Option<usize>,
    /// The error.
    pub error: Box<Error>,
}

/// The result of one pass through a program.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    /// Its duration.
    pub elapsed: Duration,
    /// Requests refused for lack of memory. Their slots stayed empty; other events of these slots
    /// were skipped.
    pub ooms: u64,
}

/// The reaction to a request that is refused for lack of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOom {
    /// Continue without the block.
    Skip,
    /// End the pass.
    Stop,
}

impl<'a, S: Subject> Player<'a, S> {
    /// A player for `program`.
    pub fn new(program: &'a Program) -> Player<'a, S> {
        Player { program, slots: (0..program.slots).map(|_| None).collect() }
    }

    /// Plays the program once. Blocks that it leaves allocated are freed after the clock has
    /// stopped.
    ///
    /// # Errors
    /// When the allocator fails for another reason than lack of memory.
    pub fn pass(&mut self, subject: &mut S, on_oom: OnOom) -> Result<Pass, PlayError> {
        let start = Instant::now();
        let played = self.play(subject, on_oom);
        let elapsed = start.elapsed();
        for handle in self.slots.iter_mut().filter_map(Option::take) {
            subject.begin_event();
            subject.free(handle);
        }
        Ok(Pass { elapsed, ooms: played? })
    }

    /// Plays the program once and leaves its blocks allocated until the player is dropped. Returns
    /// the number of requests refused for lack of memory.
    ///
    /// # Errors
    /// As [`Player::pass`].
    pub fn play(&mut self, subject: &mut S, on_oom: OnOom) -> Result<u64, PlayError> {
        let mut ooms = 0;
        let slots = &mut self.slots[..];
        for (index, event) in self.program.events.iter().enumerate() {
            if !matches!(event, Event::Iteration(_)) {
                subject.begin_event();
            }
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
                Refused::OutOfMemory(report) => {
                    if let Event::Alloc { bytes, .. } = *event {
                        subject.refused(Refusal { bytes, report });
                    }
                    if on_oom == OnOom::Stop {
                        break;
                    }
                }
                Refused::Failed(error) => return Err(PlayError { event: Some(index), error }),
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
    /// Adds a pass of `operations` operations; a pass without any has no time per operation.
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
