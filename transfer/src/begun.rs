//! What a runtime began and what is not known to be complete, so that all of it can be waited for.
//!
//! Of each stream the latest tick is kept, which covers the earlier ones, and of what threads work on, each job. Whenever as much again is
//! listed as was not complete the last time, what is complete by now is dropped: a query for a few transfers.
//!
//! Lock order: the list's lock, then those of timelines and jobs.

use std::collections::HashMap;
use std::sync::Arc;

use aquifer_device::Tick;
use aquifer_device::fork::Mutex;

use crate::error::TransferError;
use crate::job::{Job, Progress};

/// Up to so many entries are not looked at again.
const FEW: usize = 64;

/// What was begun.
#[derive(Debug, Default)]
pub(crate) struct Begun(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    /// By device and timeline.
    ticks: HashMap<(u32, u32), Tick>,
    jobs: Vec<Arc<Job>>,
    /// How many of both were left when what is complete was dropped last.
    left: usize,
}

impl Begun {
    /// Lists work that was enqueued until the tick.
    pub(crate) fn note_tick(&self, tick: &Tick) {
        let mut list = self.0.lock();
        let key = (tick.timeline().device_id(), tick.timeline().id());
        match list.ticks.get_mut(&key) {
            Some(known) if known.n() >= tick.n() => {}
            Some(known) => *known = tick.clone(),
            None => {
                list.ticks.insert(key, tick.clone());
            }
        }
        list.thin();
    }

    /// Lists work of threads.
    pub(crate) fn note_job(&self, job: &Arc<Job>) {
        let mut list = self.0.lock();
        list.jobs.push(job.clone());
        list.thin();
    }

    /// True if any of it may not be complete.
    pub(crate) fn is_open(&self) -> bool {
        let mut list = self.0.lock();
        list.drop_complete();
        list.left > 0
    }

    /// Waits until all that is listed now is complete, or has failed. Tells the first error of a wait, and waits for the rest all the same.
    pub(crate) fn wait(&self) -> Result<(), TransferError> {
        let (mut ticks, jobs): (Vec<Tick>, Vec<Arc<Job>>) = {
            let list = self.0.lock();
            (list.ticks.values().cloned().collect(), list.jobs.clone())
        };
        ticks.extend(jobs.iter().filter_map(|job| match job.wait() {
            Progress::Enqueued(tick) => Some(tick),
            Progress::Working | Progress::Finished(_) => None,
        }));
        let waited = ticks.iter().map(Tick::synchronize).fold(Ok(()), Result::and);
        Ok(waited?)
    }
}

impl List {
    fn thin(&mut self) {
        if self.ticks.len() + self.jobs.len() > FEW.max(2 * self.left) {
            self.drop_complete();
        }
    }

    fn drop_complete(&mut self) {
        // What cannot be asked now is asked later.
        let is_open = |tick: &Tick| !tick.is_done().unwrap_or(false);
        self.ticks.retain(|_, tick| is_open(tick));
        self.jobs.retain(|job| match job.progress() {
            Progress::Working => true,
            Progress::Enqueued(tick) => is_open(&tick),
            Progress::Finished(_) => false,
        });
        self.left = self.ticks.len() + self.jobs.len();
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::Device;
    use aquifer_device::sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn what_is_complete_is_forgotten() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let (begun, open) = (Begun::default(), Job::new());
        begun.note_job(&open);
        for nth in 0..1000 {
            let (stream, job) = (device.stream().unwrap(), Job::new());
            begun.note_job(&job);
            match nth % 2 {
                0 => job.finish(Ok(())),
                _ => job.enqueued(stream.tick()),
            }
            stream.tick().cover().unwrap();
            begun.note_tick(&stream.tick());
            stream.synchronize().unwrap();
            let list = begun.0.lock();
            assert!(list.ticks.len() + list.jobs.len() <= 2 * FEW, "{nth}");
        }
        open.finish(Err(TransferError::AlreadyTaken));
        assert!(!begun.is_open());
    }

    #[test]
    fn of_each_stream_the_latest_tick_counts() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let (begun, stream) = (Begun::default(), device.stream().unwrap());
        let ticks = [(); 3].map(|()| {
            let tick = stream.tick();
            tick.cover().unwrap();
            tick
        });
        for at in [0, 2, 1] {
            begun.note_tick(&ticks[at]);
        }
        let listed: Vec<u64> = begun.0.lock().ticks.values().map(Tick::n).collect();
        assert_eq!(listed, [ticks[2].n()]);
    }
}
