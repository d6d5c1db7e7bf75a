//! The events that the guide documents, with their targets and fields.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use aquifer::prelude::*;
use tracing::field::{Field, Visit};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span};

const MIB: u64 = 1 << 20;

/// Records events up to a level as text: the target, then each field.
///
/// While there is one subscriber in the process, `tracing` asks that of the thread which meets an
/// event first, which may be another test's thread without one. So there are two.
#[derive(Clone)]
pub(crate) struct Events {
    level: Level,
    lines: Arc<Mutex<Vec<String>>>,
    _another: Dispatch,
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!(" {}={value:?}", field.name());
    }
}

impl Events {
    pub(crate) fn up_to(level: Level) -> Events {
        Events { level, lines: Arc::default(), _another: Dispatch::new(NoSubscriber::default()) }
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.lines.lock().unwrap())
    }
}

impl Subscriber for Events {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(event.metadata().target().to_owned());
        event.record(&mut text);
        self.lines.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn documented_events_have_their_targets_and_fields() {
    let events = Events::up_to(Level::DEBUG);
    tracing::subscriber::with_default(events.clone(), || {
        let device = Device::open("sim:256MiB,violations=panic").unwrap();
        let memory = device.allocator_with("granule_mb:2").unwrap();
        let stream = device.stream().unwrap();
        let _reclaimer = memory.register_reclaimer(0, "cache", |_| 0);
        // Holes of 20 MiB; 120 MiB need memory from all of them.
        let mut blocks: Vec<_> = (0..12).map(|_| Some(memory.alloc::<u8>(20 << 20, &stream).unwrap())).collect();
        blocks.iter_mut().step_by(2).for_each(|block| *block = None);
        drop(memory.alloc::<u8>(100 << 20, &stream).unwrap());
        memory.alloc::<u8>(200 << 20, &stream).unwrap_err();
        assert_eq!(memory.stats().allocated_bytes.all.current, 120 * MIB);
    });
    let events = events.take();
    for (target, fields) in [
        ("aquifer::remap", &[" stream=", " bytes=104857600", " moved="][..]),
        ("aquifer::reclaim", &[" reclaimer=cache", " bytes=", " freed=0"]),
        ("aquifer::oom", &[" stream=", " requested=209715200", " allocated=125829120", " reserved="]),
    ] {
        let found =
            |line: &String| line.starts_with(&format!("{target} ")) && fields.iter().all(|field| line.contains(field));
        assert!(events.iter().any(found), "{target}: {events:#?}");
    }
}
