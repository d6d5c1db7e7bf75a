//! Teams of threads, and threads that each replace blocks of their own.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use aquifer_stress::exit::Failure;
use aquifer_trace::{Refused, Subject};

use crate::workload::{Replacements, Replacer};

/// Threads that work together.
pub(crate) trait Team {
    /// One round. Returns the time until the last thread has finished.
    fn round(&mut self, rounds: &[Replacements]) -> Result<Duration, Failure>;

    /// Frees the live blocks.
    fn leave(self);
}

/// Threads with a subject each; the calling thread if there is only one.
pub(crate) struct Replacers<S: Subject>(Vec<Replacer<S>>);

impl<S: Subject + Send> Replacers<S>
where
    S::Handle: Send,
{
    pub(crate) fn new(subjects: Vec<S>, rounds: &[Replacements]) -> Result<Replacers<S>, Failure> {
        let replacers = subjects.into_iter().zip(rounds).map(|(subject, round)| Replacer::start(subject, round));
        Ok(Replacers(replacers.collect::<Result<_, _>>().map_err(refused)?))
    }
}

impl<S: Subject + Send> Team for Replacers<S>
where
    S::Handle: Send,
{
    fn round(&mut self, rounds: &[Replacements]) -> Result<Duration, Failure> {
        if let ([replacer], [round]) = (&mut self.0[..], rounds) {
            let start = Instant::now();
            let done = replacer.round(round);
            let elapsed = start.elapsed();
            return done.map(|()| elapsed).map_err(refused);
        }
        let together = Barrier::new(self.0.len());
        let one = |replacer: &mut Replacer<S>, round: &Replacements| {
            together.wait();
            let start = Instant::now();
            let done = replacer.round(round);
            (start, Instant::now(), done)
        };
        let finished: Vec<_> = std::thread::scope(|scope| {
            let pairs = self.0.iter_mut().zip(rounds);
            let threads: Vec<_> = pairs.map(|(replacer, round)| scope.spawn(move || one(replacer, round))).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        let mut span: Option<(Instant, Instant)> = None;
        for finished in finished {
            let (start, end, done) = finished.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done.map_err(refused)?;
            span = Some(span.map_or((start, end), |(first, last)| (first.min(start), last.max(end))));
        }
        Ok(span.map_or(Duration::ZERO, |(first, last)| last - first))
    }

    fn leave(self) {
        self.0.into_iter().for_each(Replacer::leave);
    }
}

/// The failure for a refused request.
pub(crate) fn refused(refused: Refused) -> Failure {
    match refused {
        Refused::OutOfMemory(_) => Failure::OutOfMemory("the device is too small for this benchmark".to_owned()),
        Refused::Failed(error) => (*error).into(),
    }
}
