//! A recorded program under several allocators, for `explain`, `report` and `advise`.

pub mod advice;
pub mod sampled;

use crate::cli::ConfigArg;
use crate::commands::fit::{Job, fit_all};
use crate::exit::Failure;
use crate::input::Program;
use crate::observe::FirstRefusal;
use crate::profile::Profile;
use crate::session::Session;
use sampled::{Sampled, sample};

/// PyTorch's allocator with its default options.
pub const PYTORCH: &str = "backing:segments,cross_stream:off";
/// PyTorch's allocator with expandable segments and no other option.
pub const EXPANDABLE: &str = "backing:expandable";

/// Memory of the small device beyond the program's peak, in percent.
const SPARE_PERCENT: u64 = 2;

/// An allocator that a program is tried with.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Manager {
    pub id: String,
    pub name: String,
    /// Its options in the words of its users.
    pub options: String,
    pub config: ConfigArg,
}

impl Manager {
    /// This project's allocator.
    pub fn aquifer(config: ConfigArg) -> Manager {
        let id = format!("aquifer {}", config.text);
        Manager { id: id.trim_end().to_owned(), name: "Aquifer".to_owned(), options: config.text.clone(), config }
    }

    /// PyTorch's allocator with options as in `PYTORCH_ALLOC_CONF`.
    ///
    /// # Errors
    /// When there are no such options, or not in this combination.
    pub fn pytorch(id: &str, name: &str, options: &str) -> Result<Manager, String> {
        let mut set = options.split(',').map(str::trim).filter(|option| !option.is_empty());
        let expandable = set.clone().any(|option| option == "expandable_segments:True");
        let config = match (expandable, set.next()) {
            (true, _) if set.next().is_none() => EXPANDABLE.to_owned(),
            (true, _) => return Err("expandable segments are reproduced without other options".to_owned()),
            (false, None) => PYTORCH.to_owned(),
            (false, Some(_)) => format!("{PYTORCH},{options}"),
        };
        let config = config.parse::<ConfigArg>().map_err(|error| error.to_string())?;
        Ok(Manager { id: id.to_owned(), name: name.to_owned(), options: options.to_owned(), config })
    }
}

/// A program under an allocator.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Case {
    pub manager: Manager,
    pub sampled: Sampled,
    /// The smallest device on which it finishes, if it does on any.
    pub smallest_device: Option<u64>,
}

/// How a program runs out of memory under PyTorch's default options.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Exhausted {
    pub device_bytes: u64,
    /// Whether the user chose the device.
    pub chosen: bool,
    pub refusal: FirstRefusal,
}

/// A program under several allocators.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Study {
    pub profile: Profile,
    /// PyTorch's default, the options of the recording, expandable segments, and this project's.
    pub cases: Vec<Case>,
    pub exhausted: Option<Exhausted>,
}

impl Exhausted {
    /// Memory that PyTorch could still take from the device.
    pub fn device_free(&self) -> u64 {
        let memory = self.refusal.refusal.report.as_ref().and_then(|report| report.memory);
        memory.map_or(0, |memory| memory.free)
    }
}

impl Study {
    /// Tries a program. Maps are taken when most is held and in at most `maps` buckets.
    ///
    /// # Errors
    /// When an allocator fails for another reason than lack of memory.
    pub fn of(session: &Session, name: &str, program: &Program, maps: usize) -> Result<Study, Failure> {
        let profile = Profile::of(program);
        let managers = managers(session, name, program);
        let cases = try_all(session, name, program, &profile, managers, Some(maps))?;
        let exhausted = exhausted(session, program, &profile, &cases)?;
        Ok(Study { profile, cases, exhausted })
    }

    /// The case of PyTorch's default options.
    pub fn usual(&self) -> Option<&Case> {
        self.cases.first()
    }

    /// The cases that finish on the device where PyTorch's default options do not.
    pub fn finishing(&self, exhausted: &Exhausted) -> impl Iterator<Item = &Case> {
        let device = exhausted.device_bytes;
        self.cases.iter().filter(move |case| case.smallest_device.is_some_and(|smallest| smallest <= device))
    }

    /// The bytes of the peak that PyTorch's default holds without use.
    pub fn unused(&self, case: &Case) -> u64 {
        case.sampled.peak_reserved.saturating_sub(self.profile.peak.bytes)
    }
}

/// Tries a program with some allocators. Maps are taken when most is held and in at most `maps`
/// buckets; without, figures suffice, and the smallest device is a rough one.
///
/// # Errors
/// When an allocator fails for another reason than lack of memory.
pub fn try_all(
    session: &Session,
    name: &str,
    program: &Program,
    profile: &Profile,
    managers: Vec<Manager>,
    maps: Option<usize>,
) -> Result<Vec<Case>, Failure> {
    let roomy = if session.is_default_device() { &session.resized(plenty(program)) } else { session };
    let moments = maps.map(|maps| moments(profile, maps));
    let job = |manager| Job::new(name, program, manager);
    let jobs = managers.iter().map(|manager| job(&manager.config));
    let jobs: Vec<Job<'_>> = jobs.map(|job| if maps.is_some() { job } else { job.roughly() }).collect();
    let fits = fit_all(session, &jobs);
    let bar = session.progress(managers.len() as u64, name);
    let mut cases = Vec::new();
    for (manager, fit) in managers.into_iter().zip(fits) {
        let smallest_device = match fit {
            Ok(fit) => Some(fit.smallest_device_bytes),
            Err(Failure::OutOfMemory(_)) => None,
            Err(failure) => return Err(failure),
        };
        let sampled = sample(roomy, program, &manager.config, &profile.buckets, moments.as_deref())?;
        cases.push(Case { manager, sampled, smallest_device });
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(cases)
}

/// The first refusal on the user's device, or else on one with little more than the program needs.
fn exhausted(
    session: &Session,
    program: &Program,
    profile: &Profile,
    cases: &[Case],
) -> Result<Option<Exhausted>, Failure> {
    let Some(usual) = cases.first() else { return Ok(None) };
    let capacity = |session: &Session| session.sim().map_or(0, |sim| sim.capacity_bytes);
    if let Some(refusal) = &usual.sampled.first_refusal {
        let (device_bytes, chosen) = (capacity(session), !session.is_default_device());
        return Ok(Some(Exhausted { device_bytes, chosen, refusal: refusal.clone() }));
    }
    let device_bytes = (program.peak_requested_bytes / 100 * (100 + SPARE_PERCENT)).next_multiple_of(2 << 20);
    if usual.smallest_device.is_some_and(|smallest| smallest <= device_bytes) {
        return Ok(None);
    }
    let tight = session.resized(device_bytes);
    let sampled = sample(&tight, program, &usual.manager.config, &profile.buckets, None)?;
    Ok(sampled.first_refusal.map(|refusal| Exhausted { device_bytes, chosen: false, refusal }))
}

/// The allocators to try: PyTorch's, with its default options, with those of the recording and with
/// expandable segments, and this project's with the user's options.
fn managers(session: &Session, name: &str, program: &Program) -> Vec<Manager> {
    let mut all: Vec<Manager> = Vec::new();
    all.extend(Manager::pytorch("pytorch", "PyTorch", ""));
    if let Some(options) = program.options.as_deref().filter(|options| !options.is_empty()) {
        match Manager::pytorch("recorded", "PyTorch, as recorded", options) {
            Ok(recorded) if recorded.config.text == EXPANDABLE => {}
            Ok(recorded) => all.push(recorded),
            Err(why) => session.message(format_args!("note: {name}: the recording's options are left out: {why}")),
        }
    }
    let expandable = Manager::pytorch("expandable", "PyTorch, expandable segments", "expandable_segments:True");
    all.extend(expandable.ok().filter(|_| all.iter().all(|manager| !manager.config.is_expandable())));
    for config in session.configs() {
        if all.iter().all(|known| known.config.text != config.text) {
            all.push(Manager::aquifer(config.clone()));
        }
    }
    all
}

/// A device with plenty of memory, below the size at which granules get larger.
fn plenty(program: &Program) -> u64 {
    let peak = program.peak_requested_bytes;
    peak.saturating_mul(64).min(512 << 30).max(peak.saturating_mul(4)).next_multiple_of(1 << 30)
}

/// The buckets in which maps are taken: evenly spread, with that of the peak.
fn moments(profile: &Profile, most: usize) -> Vec<usize> {
    let n = profile.buckets.n;
    if most == 0 || n == 0 {
        return Vec::new();
    }
    let step = n.div_ceil(most).max(1);
    let mut moments: Vec<usize> = (0..n).step_by(step).chain([profile.peak.bucket, n - 1]).collect();
    moments.sort_unstable();
    moments.dedup();
    moments
}
