//! The passes that are timed: in turns with those of the yardstick, and before those of the driver's pool, which would else share the
//! device's memory with what the allocator holds.

use aquifer_device::PoolUsage;
use indicatif::ProgressBar;

use crate::cli::{ConfigArg, PassArgs};
use crate::driver_pool::DriverPool;
use crate::exit::Failure;
use crate::harness::{OnOom, Player, Times};
use crate::input::Program;
use crate::observe::Paced;
use crate::session::Session;
use crate::subject::Subject;
use crate::yardstick::Yardstick;

/// What else plays the program.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Beside {
    /// The bare index.
    pub(crate) yardstick: bool,
    /// The driver's own pool.
    pub(crate) driver_pool: bool,
}

/// How long passes took.
pub(super) struct Timings {
    pub(super) ours: Times,
    pub(super) yardstick: Option<Times>,
    pub(super) driver_pool: Option<Pooled>,
}

/// How the driver's pool did.
pub(super) struct Pooled {
    pub(super) times: Times,
    pub(super) usage: PoolUsage,
    /// Requests refused in the last pass.
    pub(super) ooms: u64,
}

pub(super) fn time(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    beside: Beside,
    bar: &ProgressBar,
) -> Result<Timings, Failure> {
    let streams = program.streams.len();
    let mut ours = Timed::new(Paced::new(session, config, streams, passes.lag)?, program);
    let new_yardstick = || Timed::new(Yardstick::new(program.peak_requested_bytes, program.slots), program);
    let mut yardstick = beside.yardstick.then(new_yardstick);
    let mut missed = 0;
    for _ in 0..passes.repeat {
        ours.pass()?;
        missed = yardstick.as_mut().map_or(Ok(0), Timed::pass)?;
        bar.inc(1);
    }
    if missed > 0 {
        session.message(format_args!("warning: {name}: the yardstick counts to 2 TiB and refused {missed} requests"));
    }
    let times = ours.times.clone();
    ours.subject.give_back()?;
    drop(ours);
    let driver_pool = beside.driver_pool.then(|| time_pool(session, program, passes)).transpose()?;
    Ok(Timings { ours: times, yardstick: yardstick.map(|yardstick| yardstick.times), driver_pool })
}

fn time_pool(session: &Session, program: &Program, passes: &PassArgs) -> Result<Pooled, Failure> {
    let mut pool = Timed::new(DriverPool::new(session.open()?, program.streams.len())?, program);
    let mut ooms = 0;
    for _ in 0..passes.repeat {
        ooms = pool.pass()?;
    }
    let usage = pool.subject.usage()?;
    pool.subject.give_back()?;
    Ok(Pooled { usage, times: pool.times, ooms })
}

/// A subject that plays a program again and again.
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

    /// One more pass; tells how many requests were refused.
    fn pass(&mut self) -> Result<u64, Failure> {
        let pass = self.player.pass(&mut self.subject, OnOom::Skip)?;
        self.times.add(pass.elapsed, self.operations);
        Ok(pass.ooms)
    }
}
