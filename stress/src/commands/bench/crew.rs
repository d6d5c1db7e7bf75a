//! Threads that each replace blocks of their own.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::{Team, refused};
use crate::exit::Failure;
use crate::subject::Subject;
use crate::workload::{Script, Work};

/// Subjects at work, each in a thread of its own if there are several.
pub(super) struct Crew<S: Subject> {
    works: Vec<Work<S>>,
}

impl<S: Subject + Send> Crew<S>
where
    S::Handle: Send,
{
    pub(super) fn new(subjects: Vec<S>, scripts: &[Script]) -> Result<Crew<S>, Failure> {
        let works = subjects.into_iter().zip(scripts).map(|(subject, script)| Work::start(subject, script));
        Ok(Crew { works: works.collect::<Result<_, _>>().map_err(refused)? })
    }
}

impl<S: Subject + Send> Team for Crew<S>
where
    S::Handle: Send,
{
    fn round(&mut self, scripts: &[Script]) -> Result<Duration, Failure> {
        if let ([work], [script]) = (&mut self.works[..], scripts) {
            let start = Instant::now();
            let done = work.round(script);
            let elapsed = start.elapsed();
            return done.map(|()| elapsed).map_err(refused);
        }
        let together = Barrier::new(self.works.len());
        let one = |work: &mut Work<S>, script: &Script| {
            together.wait();
            let start = Instant::now();
            let done = work.round(script);
            (start, Instant::now(), done)
        };
        let finished: Vec<_> = std::thread::scope(|scope| {
            let pairs = self.works.iter_mut().zip(scripts);
            let threads: Vec<_> = pairs.map(|(work, script)| scope.spawn(move || one(work, script))).collect();
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
        self.works.into_iter().for_each(Work::leave);
    }
}
