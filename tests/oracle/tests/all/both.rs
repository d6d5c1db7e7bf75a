//! A simulated device whose calls both checkers judge.

use std::ops::Deref;
use std::sync::Arc;

use aquifer_device::Driver;
use aquifer_oracle::{Judged, RaceKind};
use aquifer_sim::{SimConfig, SimDriver, ViolationKind};

/// What a checker found: the kinds of races, sorted.
pub(crate) type Found = Vec<RaceKind>;

#[derive(Clone)]
pub(crate) struct Both {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) judged: Arc<Judged>,
}

/// The driver that programs use.
impl Deref for Both {
    type Target = dyn Driver;

    fn deref(&self) -> &(dyn Driver + 'static) {
        &*self.judged
    }
}

impl Both {
    /// A device of 64 MiB.
    pub(crate) fn new(seed: u64) -> Both {
        let sim = SimDriver::new(SimConfig::new(64 << 20).seed(seed).checks(false));
        Both { judged: Judged::new(sim.clone()), sim }
    }

    /// What the simulator's detector and the oracle found so far.
    ///
    /// # Panics
    /// When the program misused memory otherwise.
    pub(crate) fn found(&self) -> (Found, Found) {
        let kind = |violation: &aquifer_sim::Violation| match violation.kind {
            ViolationKind::WriteWrite | ViolationKind::ReadWrite | ViolationKind::WriteRead => RaceKind::Work,
            ViolationKind::HostAccess => RaceKind::Host,
            ViolationKind::PendingWork => RaceKind::Removal,
            _ => panic!("the program is wrong: {violation}"),
        };
        let violations = self.sim.violations();
        let races = self.judged.races();
        let (mut detector, mut oracle): (Found, Found) =
            (violations.iter().map(kind).collect(), races.iter().map(|race| race.kind).collect());
        for found in [&mut detector, &mut oracle] {
            found.sort_unstable();
            found.dedup();
        }
        (detector, oracle)
    }

    /// The reports of both, for the text of a failure.
    pub(crate) fn reports(&self) -> String {
        let line = |text: String| format!("\n  {text}");
        let sim: String = self.sim.violations().iter().map(|violation| line(violation.to_string())).collect();
        let oracle: String = self.judged.races().iter().map(|race| line(race.to_string())).collect();
        format!("detector:{sim}\noracle:{oracle}")
    }

    /// Asserts that both found races of `kinds` and no others.
    #[track_caller]
    pub(crate) fn assert_found(&self, kinds: &[RaceKind]) {
        let (detector, oracle) = self.found();
        assert_eq!((detector.as_slice(), oracle.as_slice()), (kinds, kinds), "{}", self.reports());
    }
}
