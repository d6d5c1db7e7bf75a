use aquifer_trace::input::Event;

use super::*;

/// Replays the sizes: every slot is used properly, and the sums are right.
fn check(setup: &Setup) -> (u64, u64) {
    let program = &setup.program;
    let mut slots = vec![None; program.slots as usize];
    let (mut live, mut peak) = (0, 0);
    for event in &program.events {
        match *event {
            Event::Alloc { slot, bytes, stream } => {
                assert!(bytes > 0 && usize::from(stream) < program.streams.len());
                assert_eq!(slots[slot as usize].replace(bytes), None, "the slot is taken");
                live += bytes;
                peak = peak.max(live);
            }
            Event::Free { slot } => live -= slots[slot as usize].take().expect("the slot is empty"),
            Event::RecordStream { slot, stream } => {
                assert!(slots[slot as usize].is_some() && usize::from(stream) < program.streams.len());
            }
            Event::Iteration(_) => {}
        }
    }
    assert_eq!(program.peak_requested_bytes, peak);
    assert!(usize::from(setup.probe_stream) < program.streams.len());
    (live, peak)
}

#[test]
fn programs_are_sound_and_fit_the_room_at_any_size() {
    for scenario in ALL {
        for room in [0, 1, 4096, 100 << 20, 2 << 30, 24 << 30, 80 << 30, 141 << 30] {
            let setup = scenario.setup(room, 0);
            let (live, peak) = check(&setup);
            if room >= 2 << 30 {
                let name = scenario.name;
                assert!(peak <= room / 100 * 97, "{name} asks for more than there is: {peak} of {room}");
                assert!(live + setup.probe <= room / 100 * 97, "{name}: no allocator could serve the probe");
                assert!(setup.probe >= room / 12, "{name}: the probe is a large request");
            }
        }
    }
}

#[test]
fn programs_depend_on_the_seed_alone() {
    for scenario in ALL {
        assert_eq!(scenario.setup(8 << 30, 5), scenario.setup(8 << 30, 5));
    }
    let images: Scenario = "images".parse().unwrap();
    assert_ne!(images.setup(8 << 30, 5), images.setup(8 << 30, 6));
}

#[test]
fn names_are_unique() {
    let mut names: Vec<_> = ALL.iter().map(|scenario| scenario.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), ALL.len());
}
