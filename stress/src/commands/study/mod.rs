//! A recorded program under several allocators, for `explain`, `report` and `advise`.

pub mod advice;
pub mod answers;
mod graph_pools;
pub mod rows;
pub mod sampled;

use aquifer_sim::CAPACITY_BYTES_MAX;
use aquifer_trace::FirstRefusal;
use aquifer_trace::input::{Program, RecordedOom, Recorder};
use aquifer_trace::profile::Profile;

use crate::cards::smallest_card;
use crate::cli::ConfigArg;
use crate::commands::fit::{Job, attempt, fit_all, with_splitting, without_same};
use crate::commands::ratio;
use crate::exit::Failure;
use crate::session::Session;
use crate::text::{Bytes, plural};
use rows::{Allocator, Oom};
use sampled::{Sampled, sample};

/// PyTorch's allocator with its default options.
const PYTORCH: &str = "backing:pytorch";
/// PyTorch's allocator with expandable segments and no other option.
const EXPANDABLE: &str = "backing:expandable";

/// Options about what is recorded and saved. A replay must save nothing: the file may be the
/// recording itself, or any other.
const OF_RECORDING: [&str; 3] = ["oom_snapshot", "history", "tags"];
/// Options about Aquifer alone, and about the device on which a program was recorded.
const OF_AQUIFER: [&str; 1] = ["split_frames"];
const OF_DEVICE: [&str; 5] =
    ["limit_mb", "limit_free_fraction", "per_process_memory_fraction", "headroom_mb", "reserve_mb"];

/// What to know before frames are split.
pub const SPLITTING: &str = "split_frames:on is for programs of which one thread enqueues all work, or that use all \
                             memory through access guards.";

/// Memory of the small device beyond the program's peak, in parts of the peak: 2 %.
const SPARE: u64 = 50;
/// Sizes of devices are multiples of this.
const STEP: u64 = 2 << 20;
/// Events that are tried with an allocator in a second, roughly, in a release build.
const EVENTS_PER_SECOND: u64 = 50_000;

/// An allocator that a program is tried with.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Manager {
    pub id: String,
    pub name: String,
    /// Its options in the words of its users.
    pub options: String,
    pub config: ConfigArg,
    /// Whether it is PyTorch's.
    pub is_pytorch: bool,
    /// Whether the recording names these options.
    pub is_recorded: bool,
}

impl Manager {
    /// The user's options: of this project's allocator, or of PyTorch's.
    pub fn asked(config: ConfigArg) -> Manager {
        let is_pytorch = config.pytorch.is_some();
        Manager {
            id: format!("aquifer {}", config.text).trim_end().to_owned(),
            name: if is_pytorch { format!("PyTorch with {}", config.text) } else { "Aquifer".to_owned() },
            options: config.text.clone(),
            config,
            is_pytorch,
            is_recorded: false,
        }
    }

    /// PyTorch's allocator with options as in `PYTORCH_ALLOC_CONF`, but for those of recording.
    ///
    /// # Errors
    /// When there are no such options, or not in this combination.
    pub fn pytorch(id: &str, name: &str, options: &str) -> Result<Manager, String> {
        let options = &*without(options, &[&OF_RECORDING[..], &OF_AQUIFER].concat());
        let config = match options {
            "" => PYTORCH.to_owned(),
            "expandable_segments:True" => EXPANDABLE.to_owned(),
            _ => format!("{PYTORCH},{options}"),
        };
        Ok(Manager {
            id: id.to_owned(),
            name: name.to_owned(),
            options: options.to_owned(),
            config: config.parse::<ConfigArg>().map_err(|error| error.to_string())?.trial(),
            is_pytorch: true,
            is_recorded: false,
        })
    }

    /// The allocator and, if it is this project's, its options.
    pub fn title(&self) -> String {
        if self.is_pytorch || self.options.is_empty() {
            self.name.clone()
        } else {
            format!("{} with {}", self.name, self.options)
        }
    }

    /// Whether it is tried with `split_frames:on` because that may differ.
    fn splits(&self) -> bool {
        self.config.is_trial && !self.is_pytorch && self.options.ends_with("split_frames:on")
    }

    fn recorded(self) -> Manager {
        Manager { is_recorded: true, ..self }
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

impl Case {
    /// Its row, for a program that requests at most so many bytes.
    pub fn row(&self, requested: u64) -> Allocator {
        Allocator {
            title: self.manager.title(),
            name: self.manager.name.clone(),
            config: self.manager.config.text.clone(),
            peak_reserved_bytes: self.sampled.peak_reserved,
            reserved_over_requested: self.holds().and_then(|held| ratio(held, requested)),
            ooms: self.sampled.refused_at.len() as u64,
            smallest_device_bytes: self.smallest_device,
            driver_calls: Some(self.sampled.calls),
            driver_time_modelled_us: self.sampled.driver_us,
            warm_driver_time_modelled_us: self.sampled.later_us,
            smallest_card: self.smallest_device.and_then(smallest_card),
        }
    }

    /// Whether every request was served. Otherwise what it holds says little.
    pub fn finishes(&self) -> bool {
        self.sampled.refused_at.is_empty()
    }

    /// The most that it holds, if every request was served.
    pub fn holds(&self) -> Option<u64> {
        self.finishes().then_some(self.sampled.peak_reserved)
    }

    /// The modelled time of its driver calls in microseconds, if that is known and every request
    /// was served.
    pub fn driver_us(&self) -> Option<f64> {
        self.sampled.driver_us.filter(|_| self.finishes())
    }
}

/// How a program runs out of memory.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Exhausted {
    pub oom: Oom,
    pub refusal: FirstRefusal,
}

impl Exhausted {
    fn new(device_bytes: u64, is_made_up: bool, refusal: FirstRefusal, finishes_with: Vec<String>) -> Exhausted {
        let (event, requested_bytes) = (refusal.event, refusal.refusal.bytes);
        let (figures, on_device) = (refusal.map.figures(), refusal.map.free_on_device());
        let (free_bytes, largest_free_bytes) = (figures.free + on_device, figures.largest_free.max(on_device));
        let oom =
            Oom { device_bytes, is_made_up, event, requested_bytes, free_bytes, largest_free_bytes, finishes_with };
        Exhausted { oom, refusal }
    }

    /// A sentence about the device, if it is made up for a program that uses at most `peak` bytes.
    pub fn about_device(&self, peak: u64) -> Option<String> {
        let what = match self.oom.device_bytes.checked_sub(peak) {
            None => "it is the largest that can be simulated".to_owned(),
            Some(_) => format!("it has {} than the program ever uses", more_than(peak, self.oom.device_bytes)),
        };
        self.oom.is_made_up.then(|| format!("The device is made up, to show how memory runs out: {what}."))
    }

    /// Why the largest free piece does not serve the request, if it is large enough.
    pub fn why_not_served(&self, manager: &Manager) -> Option<String> {
        let FirstRefusal { refusal, map, .. } = &self.refusal;
        let options = manager.config.pytorch.as_ref().filter(|options| !options.expandable_segments)?;
        let (rest, segment) = (map.free_on_device(), options.segment_of_request(refusal.bytes));
        if self.oom.largest_free_bytes < refusal.bytes || rest >= segment {
            return None;
        }
        Some(if rest >= refusal.bytes {
            let [rest, segment] = [rest, segment].map(Bytes);
            format!("{} takes a segment of {segment} for it, and the device has {rest} left.", manager.name)
        } else {
            "That piece does not serve it: it is of another pool or stream, or kept for larger requests.".to_owned()
        })
    }
}

/// Options without those of these names. Brackets may hold commas.
pub fn without(options: &str, names: &[&str]) -> String {
    let is_left = |option: &&str| !option.is_empty() && !names.contains(&option.split(':').next().unwrap_or_default());
    options.split(',').map(str::trim).filter(is_left).collect::<Vec<_>>().join(",")
}

/// How much more than `peak` bytes a device has.
pub fn more_than(peak: u64, device_bytes: u64) -> String {
    let more = device_bytes.saturating_sub(peak);
    let share = match ratio(more.saturating_mul(100), peak) {
        Some(share) if share < 10.0 => format!(" ({share:.1} %)"),
        Some(share) if share < 1000.0 => format!(" ({share:.0} %)"),
        _ => String::new(),
    };
    format!("{} more{share}", Bytes(more))
}

/// A program with its options of recording, or else PyTorch's, on the device of --device.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Asked {
    pub device_bytes: u64,
    /// The allocator with which it is replayed; `None` for a program without a history.
    pub manager: Option<Manager>,
    /// The first request that is refused.
    pub refused: Option<RecordedOom>,
}

impl Asked {
    /// Replays a program, if the user named a device. Its profile has the moment of the refusal
    /// there.
    ///
    /// # Errors
    /// When the allocator fails for another reason than lack of memory.
    pub fn of(session: &Session, program: &Program) -> Result<(Profile, Option<Asked>), Failure> {
        let profile = Profile::of(program);
        let Some(device_bytes) = asked_bytes(session) else { return Ok((profile, None)) };
        let all = if program.has_history { managers(session, program, &mut Vec::new()) } else { Vec::new() };
        let usual = all.iter().find(|manager| manager.is_recorded).or(all.first());
        let mut asked = Asked { device_bytes, manager: usual.cloned(), refused: None };
        let Some(usual) = usual else { return Ok((profile, Some(asked))) };
        let sampled = sample(&session.resized(device_bytes), program, &usual.config, &profile.buckets, None)?;
        let Some(FirstRefusal { event, refusal, map }) = sampled.first_refusal else {
            return Ok((profile, Some(asked)));
        };
        let figures = map.figures();
        asked.refused = Some(RecordedOom {
            event,
            bytes: refusal.bytes,
            held_bytes: figures.live + figures.free + figures.waiting,
            device_free_bytes: Some(map.free_on_device()),
            stream: 0,
            site: program.site_of(event),
            is_last: false,
        });
        Ok((Profile::before(program, event), Some(asked)))
    }

    /// Whether every request is served there; `None` if that is not known.
    pub fn finishes(&self) -> Option<&Manager> {
        self.manager.as_ref().filter(|_| self.refused.is_none())
    }
}

/// A program under several allocators.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Study {
    pub profile: Profile,
    /// What becomes of it on the device of --device.
    pub asked: Option<Asked>,
    /// The device on which the allocators were tried.
    pub tried_on: String,
    /// PyTorch's default, the options of the recording, expandable segments, and this project's.
    pub cases: Vec<Case>,
    /// How the program runs out of memory in the usual case.
    pub exhausted: Option<Exhausted>,
    /// Why allocators were left out.
    pub notes: Vec<String>,
}

impl Study {
    /// Tries a program, after a message that says how long that takes. Maps are taken when most is
    /// held and in at most `maps` buckets. The profile and what becomes of the program on the user's
    /// device are of [`Asked::of`].
    ///
    /// # Errors
    /// When PyTorch's default allocator fails for another reason than lack of memory.
    pub fn of(
        session: &Session,
        name: &str,
        program: &Program,
        (profile, asked): (Profile, Option<Asked>),
        maps: usize,
    ) -> Result<Study, Failure> {
        let mut notes = Vec::new();
        // Nothing is known of what a program without a history would have done.
        let managers = if program.has_history { managers(session, program, &mut notes) } else { Vec::new() };
        if program.has_history {
            session.message(format_args!(
                "{name}: {} events; trying {} takes {}",
                profile.buckets.events,
                plural(managers.len() as u64, "allocator"),
                time_of_trials(profile.buckets.events, managers.len() as u64)
            ));
        }
        let mut cases = Vec::new();
        let roomy = roomy(session, program);
        for tried in try_all(session, &roomy, program, &profile, managers, Some(maps)) {
            match tried {
                Ok(case) => cases.push(case),
                Err((_, failure)) if cases.is_empty() => return Err(failure),
                Err((name, failure)) => notes.push(format!("{name} is left out: {failure}")),
            }
        }
        let splitting = cases.iter().filter(|case| case.manager.splits()).map(|case| case.manager.config.clone());
        let splitting: Vec<ConfigArg> = splitting.collect();
        without_same(
            &mut cases,
            &splitting,
            |case| &case.manager.config.text,
            |case: &Case| (case.smallest_device, case.sampled.peak_reserved, case.sampled.refused_at.len()),
        );
        notes.iter().for_each(|note| session.message(format_args!("note: {name}: {note}")));
        let tried_on = format!("a {}", roomy.open()?.info().name.replacen("Simulated", "simulated", 1));
        let mut study = Study { profile, asked, tried_on, cases, exhausted: None, notes };
        study.exhausted = exhausted(session, program, &study)?;
        Ok(study)
    }

    /// The case to compare with: that of the recording's options, or of PyTorch's default.
    pub fn usual(&self) -> Option<&Case> {
        self.cases.iter().find(|case| case.manager.is_recorded).or(self.cases.first())
    }

    /// The first case of this project's allocator.
    pub fn own(&self) -> Option<&Case> {
        self.cases.iter().find(|case| !case.manager.is_pytorch)
    }

    /// The case of this project's allocator with the user's options and `split_frames:on`, if that
    /// makes a difference.
    pub fn splitting(&self) -> Option<&Case> {
        self.cases.iter().find(|case| case.manager.splits())
    }
}

/// Tries a program with some allocators, on a device of `roomy` and on smaller ones. Maps are taken when most is held and in at most `maps`
/// buckets; without, figures suffice, and the smallest device is a rough one. An allocator that
/// fails for another reason than lack of memory is named with its error.
pub(super) fn try_all(
    session: &Session,
    roomy: &Session,
    program: &Program,
    profile: &Profile,
    managers: Vec<Manager>,
    maps: Option<usize>,
) -> Vec<Result<Case, (String, Failure)>> {
    let name = &program.name;
    let moments = maps.map(|maps| moments(profile, maps));
    let jobs = managers.iter().map(|manager| {
        let job = Job::new(name, program, &manager.config);
        if maps.is_some() { job } else { job.roughly() }
    });
    let fits = fit_all(session, &jobs.collect::<Vec<_>>());
    let bar = session.progress(managers.len() as u64, name);
    let mut cases = Vec::new();
    for (manager, fit) in managers.into_iter().zip(fits) {
        bar.inc(1);
        let smallest_device = match fit {
            Ok(fit) => Ok(Some(fit.smallest_device_bytes)),
            Err(Failure::OutOfMemory(_)) => Ok(None),
            Err(failure) => Err(failure),
        };
        let sampled = || sample(roomy, program, &manager.config, &profile.buckets, moments.as_deref());
        match smallest_device.and_then(|smallest| Ok((smallest, sampled()?))) {
            Ok((smallest_device, sampled)) => {
                let mut case = Case { manager, sampled, smallest_device };
                // A rough search may end above the device on which the program has just finished.
                if let Some(here) = roomy.sim().map(|sim| sim.capacity_bytes).filter(|_| case.finishes()) {
                    case.smallest_device = Some(case.smallest_device.map_or(here, |smallest| smallest.min(here)));
                }
                cases.push(Ok(case));
            }
            Err(failure) => cases.push(Err((manager.name, failure))),
        }
    }
    bar.finish_and_clear();
    cases
}

/// The first refusal on the session's device, or else on one with little more than the program
/// needs.
fn exhausted(session: &Session, program: &Program, study: &Study) -> Result<Option<Exhausted>, Failure> {
    let Some(usual) = study.usual() else { return Ok(None) };
    if let Some(refusal) = &usual.sampled.first_refusal {
        let device_bytes = roomy(session, program).sim().map_or(0, |sim| sim.capacity_bytes);
        let finishing = study.cases.iter().filter(|case| case.finishes()).map(|case| case.manager.title()).collect();
        return Ok(Some(Exhausted::new(device_bytes, session.is_default_device(), refusal.clone(), finishing)));
    }
    let recorded = program.recorded.oom().and_then(|oom| oom.capacity_bytes()).filter(|_| session.is_default_device());
    let device_bytes = recorded.filter(|&bytes| bytes > 0).unwrap_or_else(|| tight(program)).min(CAPACITY_BYTES_MAX);
    let sampled = sample(&session.resized(device_bytes), program, &usual.manager.config, &study.profile.buckets, None)?;
    let Some(refusal) = sampled.first_refusal else { return Ok(None) };
    // What fails there for another reason does not finish, either.
    let managers = study.cases.iter().map(|case| &case.manager).filter(|manager| {
        let job = Job::new(&manager.name, program, &manager.config);
        matches!(attempt(session, &job, device_bytes), Ok(Some(_)))
    });
    let finishing = managers.map(Manager::title).collect();
    Ok(Some(Exhausted::new(device_bytes, recorded.is_none(), refusal, finishing)))
}

/// About how long trying a program of so many events takes, in words: a search for the smallest
/// device replays it some dozens of times.
fn time_of_trials(events: u64, allocators: u64) -> String {
    let seconds = events.saturating_mul(allocators) / EVENTS_PER_SECOND;
    match seconds {
        0..10 => "some seconds".to_owned(),
        10..60 => "less than a minute".to_owned(),
        _ => format!("about {}", plural(seconds.div_ceil(60), "minute")),
    }
}

/// The size of a device with little more memory than the program uses.
pub fn tight(program: &Program) -> u64 {
    let peak = program.peak_requested_bytes;
    rounded(peak.saturating_add(peak / SPARE), STEP)
}

/// The allocators to try: for a program that Aquifer served, this project's with the options of the
/// recording; for others PyTorch's, with its default options, with those of the recording and with
/// expandable segments. Then this project's with the user's options.
fn managers(session: &Session, program: &Program, notes: &mut Vec<String>) -> Vec<Manager> {
    let mut all: Vec<Manager> = Vec::new();
    let options = program.options.as_deref().unwrap_or_default();
    if program.recorder == Recorder::Aquifer {
        let options = without(options, &[&OF_RECORDING[..], &OF_DEVICE].concat());
        match options.parse::<ConfigArg>() {
            Ok(config) => all.extend(with_splitting(&[config.trial()]).into_iter().map(Manager::asked)),
            Err(why) => notes.push(format!("the options of the recording, {options}, are not tried: {why}")),
        }
        if let Some(recorded) = all.first_mut() {
            recorded.is_recorded = true;
        }
        add_asked(session, &mut all);
        return all;
    }
    all.extend(Manager::pytorch("pytorch", "PyTorch", ""));
    let recorded = Manager::pytorch("recorded", "PyTorch, as recorded", options).map(Manager::recorded);
    match recorded {
        Ok(recorded) if all.iter().all(|known| !known.config.is_same(&recorded.config)) => all.push(recorded),
        Ok(_) => {}
        Err(why) => notes.push(format!("the options of the recording, {options}, are not tried: {why}")),
    }
    let expandable = Manager::pytorch("expandable", "PyTorch, expandable segments", "expandable_segments:True");
    all.extend(expandable.ok().filter(|new| all.iter().all(|known| !known.config.is_same(&new.config))));
    add_asked(session, &mut all);
    all
}

/// Adds the user's options, unless they are known.
fn add_asked(session: &Session, all: &mut Vec<Manager>) {
    for config in with_splitting(session.configs()) {
        if all.iter().all(|known| known.config.text != config.text) {
            all.push(Manager::asked(config));
        }
    }
}

/// The capacity of the simulated device that the user asked for.
pub fn asked_bytes(session: &Session) -> Option<u64> {
    session.sim().filter(|_| !session.is_default_device()).map(|sim| sim.capacity_bytes)
}

/// The session on the user's device, or else on one with plenty of memory.
fn roomy(session: &Session, program: &Program) -> Session {
    session.resized(asked_bytes(session).unwrap_or_else(|| plenty(program)))
}

/// The size of a device with plenty of memory, below that at which granules get larger.
pub(super) fn plenty(program: &Program) -> u64 {
    let peak = program.peak_requested_bytes;
    rounded(peak.saturating_mul(64).min(512 << 30).max(peak.saturating_mul(4)), 1 << 30)
}

/// A size rounded up to a multiple of `step`, at most that of the largest device.
fn rounded(bytes: u64, step: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(step).unwrap_or(u64::MAX).min(CAPACITY_BYTES_MAX)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;
    use aquifer_trace::input;

    fn study(device: Option<&str>, text: &str, options: Option<&str>) -> Study {
        let program = input::read("p.trace".as_ref(), text.as_bytes()).unwrap().remove(0);
        let program = Program { options: options.map(str::to_owned), ..program };
        let device = device.map(|device| device.parse().unwrap());
        let session = Session::new(&Global { device, ..Global::default() }).unwrap().for_measuring();
        Study::of(&session, "p", &program, Asked::of(&session, &program).unwrap(), 4).unwrap()
    }

    fn names(study: &Study) -> Vec<&str> {
        study.cases.iter().map(|case| &*case.manager.name).collect()
    }

    const PROGRAM: &str = "a 1 30000000 0\na 2 1000 0\nf 1 0\na 3 50000000 0\nf 3 0\nf 2 0\n";

    #[test]
    fn the_recordings_options_are_the_usual_case() {
        let usual = study(None, PROGRAM, None);
        assert_eq!(names(&usual), ["PyTorch", "PyTorch, expandable segments", "Aquifer"]);
        assert_eq!(usual.usual().unwrap().manager.id, "pytorch");
        let recorded = study(None, PROGRAM, Some("max_split_size_mb:64"));
        let all = ["PyTorch", "PyTorch, as recorded", "PyTorch, expandable segments", "Aquifer"];
        assert_eq!(names(&recorded), all);
        assert_eq!(recorded.usual().unwrap().manager.options, "max_split_size_mb:64");
        let expandable = study(None, PROGRAM, Some("expandable_segments:True"));
        assert_eq!(names(&expandable), ["PyTorch", "PyTorch, as recorded", "Aquifer"]);
        let own = study(None, PROGRAM, Some("history:9, tags:span,split_frames:on"));
        assert_eq!(names(&own), names(&usual), "these options change nothing");
        for odd in ["expandable_segments:True,max_split_size_mb:64", "no_such_option:1"] {
            let odd = study(None, PROGRAM, Some(odd));
            assert_eq!(names(&odd), names(&usual));
            assert!(odd.notes[0].contains("are not tried"), "{:?}", odd.notes);
        }
    }

    #[test]
    fn options_of_a_recording_save_nothing() {
        let path = std::env::temp_dir().join(format!("aquifer-study-{}.pickle", std::process::id()));
        let options = format!("max_split_size_mb:64,oom_snapshot:{}", path.display());
        let study = study(Some("sim:48MiB"), PROGRAM, Some(&options));
        assert!(study.exhausted.is_some() && !path.exists());
        assert_eq!(study.usual().unwrap().manager.options, "max_split_size_mb:64");
    }

    #[test]
    fn devices_have_a_size_whatever_the_program_uses() {
        for bytes in [1, 600 << 20, 1 << 40, 1 << 52, (1 << 63) - 1] {
            let study = study(None, &format!("a 1 {bytes} 0\nf 1 0\n"), None);
            assert_eq!(study.profile.peak.bytes, bytes);
            if let Some(exhausted) = &study.exhausted {
                assert!(exhausted.oom.device_bytes >= STEP, "{bytes}");
                assert!(exhausted.oom.is_made_up, "{bytes}");
                assert!(exhausted.oom.device_bytes > bytes || bytes > CAPACITY_BYTES_MAX, "{bytes}");
            }
        }
    }

    #[test]
    fn what_lacks_memory_on_the_users_device_is_told_of_that_device() {
        let study = study(Some("sim:48MiB"), PROGRAM, None);
        let exhausted = study.exhausted.unwrap();
        assert_eq!(
            (exhausted.oom.device_bytes, exhausted.oom.is_made_up, exhausted.refusal.event),
            (48 << 20, false, 4)
        );
    }
}
