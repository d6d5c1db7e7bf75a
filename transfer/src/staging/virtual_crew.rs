//! Workers in virtual time.
//!
//! They take the same tasks from the same [`Ring`] as the threads of a [`crate::Transfer`] do, and do the same steps with them. Each has a clock;
//! whoever's clock is behind the device's does its next step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use aquifer_device::Tick;

use super::config::Sizes;
use super::crew::nanoseconds;
use super::ring::Ring;
use super::schedule::{Stage, VirtualSchedule};
use super::task::{After, Done, Task, Way};
use super::work::{Chunk, InFlight, Piece, Work, fill, land, send};
use crate::error::TransferError;

/// A thread that is not one.
struct Worker {
    /// When it is done with what it does, in virtual ns.
    at: u64,
    doing: Doing,
}

enum Doing {
    /// Nothing, so it looks for a task.
    Nothing,
    /// It copies into or out of a chunk.
    Copying(Piece, Way),
    /// It waits for a copy.
    Waiting(InFlight),
}

/// A schedule that is being played.
pub(super) struct Play<'a> {
    schedule: &'a VirtualSchedule,
    sizes: Sizes,
    stage: &'a Stage,
    ring: Ring<Arc<Work>, Chunk, Tick>,
    workers: Vec<Worker>,
    /// Copies not known to be done, with their bytes, in order.
    sent: VecDeque<(Tick, u64)>,
    arrivals: Vec<(u64, u64)>,
    ended: Option<Result<(), TransferError>>,
}

/// How far apart in virtual time the device is looked at: how inexactly times are known.
const GLANCE_NS: u64 = 500;

impl<'a> Play<'a> {
    pub(super) fn new(schedule: &'a VirtualSchedule, sizes: Sizes, stage: &'a Stage) -> Self {
        let workers = (0..sizes.threads).map(|_| Worker { at: 0, doing: Doing::Nothing }).collect();
        let (sent, arrivals) = (VecDeque::new(), Vec::new());
        Play { schedule, sizes, stage, ring: Ring::new(), workers, sent, arrivals, ended: None }
    }

    /// When copies were seen to be done, in virtual ns, and their bytes.
    pub(super) fn arrivals(&self) -> &[(u64, u64)] {
        &self.arrivals
    }

    /// Chunks that there are, and the size of each in bytes.
    pub(super) fn chunks(&self) -> (usize, usize) {
        self.ring.chunks()
    }

    fn now(&self) -> u64 {
        self.stage.sim.now_ns()
    }

    /// Plays a transfer until it has ended and its copies are done.
    pub(super) fn run(&mut self, work: Work) -> Result<(), TransferError> {
        self.ring.submit(work.order())?;
        loop {
            self.look()?;
            let mut moved = false;
            for index in 0..self.workers.len() {
                moved |= self.step(index)?;
            }
            match self.ended.take() {
                Some(Ok(())) if !self.sent.is_empty() => self.ended = Some(Ok(())),
                Some(result) => return result,
                None => {}
            }
            if !moved {
                self.stage.sim.advance(Duration::from_nanos(self.until_next()));
            }
        }
    }

    /// Notes the copies that are done by now.
    fn look(&mut self) -> Result<(), TransferError> {
        while let Some((tick, bytes)) = self.sent.front()
            && tick.is_done()?
        {
            self.arrivals.push((self.now(), *bytes));
            self.sent.pop_front();
        }
        Ok(())
    }

    /// How long nothing is to be done.
    fn until_next(&self) -> u64 {
        let now = self.now();
        let busy = self.workers.iter().map(|worker| worker.at).filter(|&at| at > now).min();
        busy.map_or(GLANCE_NS, |at| (at - now).min(GLANCE_NS)).max(1)
    }

    /// Lets a worker do its next step, if it is time for that and there is one.
    fn step(&mut self, index: usize) -> Result<bool, TransferError> {
        let now = self.now();
        let worker = &mut self.workers[index];
        if worker.at > now {
            return Ok(false);
        }
        match std::mem::replace(&mut worker.doing, Doing::Nothing) {
            Doing::Waiting(flight) if !flight.tick.timeline().is_known_done(flight.tick.n()) => {
                worker.doing = Doing::Waiting(flight);
                return Ok(false);
            }
            Doing::Waiting(flight) => {
                worker.at = now + nanoseconds(self.schedule.call);
                self.complete(Done::Waited(flight, Ok(())));
            }
            Doing::Copying(piece, Way::Up) => self.send(index, piece, Way::Up)?,
            Doing::Copying(piece, Way::Down) => self.complete(Done::Landed(piece)),
            Doing::Nothing => match self.ring.next() {
                Some(task) => self.begin(index, task)?,
                None => return Ok(false),
            },
        }
        Ok(true)
    }

    fn begin(&mut self, index: usize, task: Task<Arc<Work>, Chunk, Tick>) -> Result<(), TransferError> {
        match task {
            Task::Tune => self.complete(Done::Tuned(self.sizes)),
            Task::Grow { bytes, .. } => {
                let grown = self.stage.pool.alloc(bytes);
                self.workers[index].at = self.now();
                self.complete(Done::Grown(grown));
            }
            Task::Fetch(piece) => self.send(index, piece, Way::Down)?,
            Task::Fill(mut piece) => match fill(&mut piece) {
                Ok(()) => self.copying(index, piece, Way::Up),
                Err(error) => self.complete(Done::Failed(piece, error)),
            },
            Task::Land(piece) => match land(&piece) {
                Ok(()) => self.copying(index, piece, Way::Down),
                Err(error) => self.complete(Done::Failed(piece, error)),
            },
            Task::Wait(flight) => self.workers[index].doing = Doing::Waiting(flight),
        }
        Ok(())
    }

    fn copying(&mut self, index: usize, piece: Piece, way: Way) {
        let takes = (piece.range.end - piece.range.start) / self.schedule.copy_gb_s.max(1);
        self.workers[index] = Worker { at: self.now() + takes, doing: Doing::Copying(piece, way) };
    }

    /// Enqueues a piece's copy. The calls take what the schedule says, and nobody else makes one meanwhile.
    fn send(&mut self, index: usize, mut piece: Piece, way: Way) -> Result<(), TransferError> {
        let (start, calls) = (self.now(), self.stage.sim.calls_made());
        let sent = send(&mut piece, way);
        let calls = self.stage.sim.calls_made() - calls;
        let end = start + calls * nanoseconds(self.schedule.call);
        while self.now() < end {
            self.stage.sim.advance(Duration::from_nanos((end - self.now()).min(GLANCE_NS)));
            self.look()?;
        }
        self.workers[index].at = self.now();
        match sent {
            Ok(tick) => {
                self.sent.push_back((tick.clone(), piece.range.end - piece.range.start));
                self.complete(Done::Sent(piece, tick));
            }
            Err(error) => self.complete(Done::Failed(piece, error)),
        }
        Ok(())
    }

    fn complete(&mut self, done: Done<Arc<Work>, Chunk, Tick>) {
        let After { ended, surplus } = self.ring.complete(done);
        drop(surplus);
        for (work, result) in ended {
            self.ended = Some(result.clone());
            if let Some(work) = Arc::into_inner(work) {
                work.end(result);
            }
        }
    }
}
