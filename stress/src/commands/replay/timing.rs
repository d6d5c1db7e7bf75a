//! The timed passes. They alternate with those of the yardstick, and precede those of the driver's
//! pool, which would otherwise share the device's memory with the allocator.

use aquifer::Device;
use aquifer_trace::input::Program;
use aquifer_trace::{DriverPool, OnOom, Player, Subject, Times, Yardstick};
use indicatif::ProgressBar;

use crate::cli::PassArgs;
use crate::commands::fit::Job;
use crate::commands::hundredths;
use crate::exit::Failure;
use crate::opened::Opened;
use crate::row::row;
use crate::session::Session;
use crate::table::{bytes, tenths};

/// Other subjects that play the program.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Beside {
    /// The bare index.
    pub(crate) yardstick: bool,
    /// The driver's own pool.
    pub(crate) driver_pool: bool,
}

/// The times of the passes.
pub(super) struct Timings {
    pub(super) ours: Times,
    pub(super) yardstick: Option<Times>,
    pub(super) driver_pool: Option<Pool>,
}

row! {
    /// The driver's own pool
    #[derive(Default)]
    pub(super) struct Pool {
        /// the same as ns_per_op of the driver's pool; null, like the next keys, without --driver-pool
        pool_ns_per_op: Option<f64> => ["driver's pool, ns/op", tenths],
        /// time per event of its first pass
        pool_first_pass_ns_per_op: Option<f64>,
        /// time of all its passes together
        pool_seconds: Option<f64>,
        /// the most memory that it held from the device. A real driver keeps one high-water mark for
        /// the whole process; where this program did not raise it, the value is the most held at the
        /// end of a pass
        pool_peak_reserved_bytes: Option<u64> => ["driver's pool holds", bytes],
        /// requests that it refused in all passes
        pool_ooms: Option<u64>,
    }
}

/// A program to replay.
pub(super) struct Replay<'a> {
    pub(super) session: &'a Session,
    pub(super) job: &'a Job<'a>,
    pub(super) passes: &'a PassArgs,
    pub(super) beside: Beside,
    pub(super) bar: &'a ProgressBar,
}

impl Replay<'_> {
    pub(super) fn time<S: Opened>(&self) -> Result<Timings, Failure> {
        let Replay { session, job: Job { name, program, config, .. }, passes, beside, bar } = *self;
        let mut ours = Timed::new(S::lagging(session, config, program.streams.len(), passes.lag)?, program);
        let new_yardstick = || Timed::new(Yardstick::new(program.peak_requested_bytes, program.slots), program);
        let mut yardstick = beside.yardstick.then(new_yardstick);
        let mut missed = 0;
        for _ in 0..passes.repeat {
            ours.pass()?;
            missed += yardstick.as_mut().map_or(Ok(0), Timed::pass)?;
            bar.inc(1);
        }
        if missed > 0 {
            session
                .message(format_args!("warning: {name}: the yardstick counts to 2 TiB and refused {missed} requests"));
        }
        let times = ours.times.clone();
        // Other subjects need the memory.
        ours.subject.empty_cache()?;
        drop(ours);
        let driver_pool = beside.driver_pool.then(|| time_pool(session.open()?, program, passes)).transpose()?;
        Ok(Timings { ours: times, yardstick: yardstick.map(|yardstick| yardstick.times), driver_pool })
    }
}

fn time_pool(device: Device, program: &Program, passes: &PassArgs) -> Result<Pool, Failure> {
    let mut pool = Timed::new(DriverPool::new(device, program.streams.len())?, program);
    let before = pool.subject.usage()?.reserved_peak;
    let (mut ooms, mut held) = (0, 0);
    for _ in 0..passes.repeat {
        ooms += pool.pass()?;
        held = pool.subject.usage()?.reserved.max(held);
    }
    let reserved = most_held(before, pool.subject.usage()?.reserved_peak, held);
    pool.subject.give_back()?;
    Ok(Pool {
        pool_ns_per_op: pool.times.later().map(hundredths),
        pool_first_pass_ns_per_op: pool.times.first().map(hundredths),
        pool_seconds: Some(pool.times.all().as_secs_f64()),
        pool_peak_reserved_bytes: Some(reserved),
        pool_ooms: Some(ooms),
    })
}

/// The most memory that the pool held. The driver keeps one high-water mark for the whole process,
/// so it counts only if it rose above `before`. Otherwise the result is the most held at the end of
/// a pass: the host does not wait during passes, so the pool released nothing.
fn most_held(before: u64, mark: u64, at_ends: u64) -> u64 {
    if mark > before { mark } else { at_ends }
}

/// A subject that plays a program in several passes.
struct Timed<'a, S: Subject> {
    subject: S,
    player: Player<'a, S>,
    times: Times,
    operations: u64,
}

impl<'a, S: Subject> Timed<'a, S> {
    fn new(subject: S, program: &'a Program) -> Self {
        Timed { subject, player: Player::new(program), times: Times::default(), operations: program.operations() }
    }

    /// One more pass. Returns the number of refused requests.
    fn pass(&mut self) -> Result<u64, Failure> {
        let pass = self.player.pass(&mut self.subject, OnOom::Skip)?;
        self.times.add(pass.elapsed, self.operations);
        Ok(pass.ooms)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_mark_of_another_program_is_not_reported() {
        let device = aquifer::open("sim:4GiB").unwrap();
        let most = |text: &str| {
            let programs = aquifer_trace::input::read(Path::new("made.trace"), text.as_bytes()).unwrap();
            time_pool(device.clone(), &programs[0], &PassArgs { repeat: 2, lag: 0 }).unwrap().pool_peak_reserved_bytes
        };
        assert_eq!(most("a 0 1000000000 0\nf 0 0\n"), Some(1_000_000_000));
        assert!(most("a 0 3000000 0\nf 0 0\n").unwrap() <= 3_000_000);
        assert_eq!(device.driver().pool_usage().unwrap().reserved_peak, 1_000_000_000, "the mark stays");
    }

    #[test]
    fn an_old_mark_of_the_pool_is_not_taken_for_a_new_one() {
        assert_eq!(most_held(0, 70, 60), 70);
        assert_eq!(most_held(70, 80, 60), 80);
        assert_eq!(most_held(70, 70, 30), 30);
    }
}
