//! The timed passes. They alternate with those of the yardstick, and precede those of the driver's
//! pool, which would otherwise share the device's memory with the allocator.

use aquifer::Device;
use aquifer_trace::input::Program;
use aquifer_trace::{DriverPool, OnOom, Player, Subject, Times, Yardstick};
use indicatif::ProgressBar;

use crate::cli::{ConfigArg, PassArgs};
use crate::exit::Failure;
use crate::opened::Opened;
use crate::session::Session;

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
    pub(super) driver_pool: Option<Pooled>,
}

/// The passes of the driver's pool.
pub(super) struct Pooled {
    pub(super) times: Times,
    /// The most memory that it held from the device.
    pub(super) reserved: u64,
    /// Requests refused in all passes.
    pub(super) ooms: u64,
}

pub(super) fn time<S: Opened>(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    beside: Beside,
    bar: &ProgressBar,
) -> Result<Timings, Failure> {
    let streams = program.streams.len();
    let mut ours = Timed::new(S::lagging(session, config, streams, passes.lag)?, program);
    let new_yardstick = || Timed::new(Yardstick::new(program.peak_requested_bytes, program.slots), program);
    let mut yardstick = beside.yardstick.then(new_yardstick);
    let mut missed = 0;
    for _ in 0..passes.repeat {
        ours.pass()?;
        missed += yardstick.as_mut().map_or(Ok(0), Timed::pass)?;
        bar.inc(1);
    }
    if missed > 0 {
        session.message(format_args!("warning: {name}: the yardstick counts to 2 TiB and refused {missed} requests"));
    }
    let times = ours.times.clone();
    // Other subjects need the memory.
    ours.subject.empty_cache()?;
    drop(ours);
    let driver_pool = beside.driver_pool.then(|| time_pool(session.open()?, program, passes)).transpose()?;
    Ok(Timings { ours: times, yardstick: yardstick.map(|yardstick| yardstick.times), driver_pool })
}

fn time_pool(device: Device, program: &Program, passes: &PassArgs) -> Result<Pooled, Failure> {
    let mut pool = Timed::new(DriverPool::new(device, program.streams.len())?, program);
    let before = pool.subject.usage()?.reserved_peak;
    let (mut ooms, mut held) = (0, 0);
    for _ in 0..passes.repeat {
        ooms += pool.pass()?;
        held = pool.subject.usage()?.reserved.max(held);
    }
    let reserved = most_held(before, pool.subject.usage()?.reserved_peak, held);
    pool.subject.give_back()?;
    Ok(Pooled { reserved, times: pool.times, ooms })
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
            time_pool(device.clone(), &programs[0], &PassArgs { repeat: 2, lag: 0 }).unwrap().reserved
        };
        assert_eq!(most("a 0 1000000000 0\nf 0 0\n"), 1_000_000_000);
        assert!(most("a 0 3000000 0\nf 0 0\n") <= 3_000_000);
        assert_eq!(device.driver().pool_usage().unwrap().reserved_peak, 1_000_000_000, "the mark stays");
    }

    #[test]
    fn an_old_mark_of_the_pool_is_not_taken_for_a_new_one() {
        assert_eq!(most_held(0, 70, 60), 70);
        assert_eq!(most_held(70, 80, 60), 80);
        assert_eq!(most_held(70, 70, 30), 30);
    }
}
