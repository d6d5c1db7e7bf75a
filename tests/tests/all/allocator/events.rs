//! The events that `docs/statistics.md` documents, with their targets and fields.

use std::fmt::Debug;

use aquifer::prelude::*;
use aquifer_tests::prelude::*;
use tracing::field::{Field, Visit};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span};

const MIB: u64 = 1 << 20;

/// Passes some events to a closure.
///
/// While there is one subscriber in the process, `tracing` asks that of the thread which meets an
/// event first, which may be another test's thread without one. So there are two.
pub(crate) struct Listener<F> {
    hears: fn(&Metadata<'_>) -> bool,
    listen: F,
    _another: Dispatch,
}

impl<F: Fn(&Event<'_>)> Listener<F> {
    pub(crate) fn new(hears: fn(&Metadata<'_>) -> bool, listen: F) -> Listener<F> {
        Listener { hears, listen, _another: Dispatch::new(NoSubscriber::default()) }
    }
}

impl<F: Fn(&Event<'_>) + 'static> Subscriber for Listener<F> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        (self.hears)(metadata)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        (self.listen)(event);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0 += &format!(" {}={value:?}", field.name());
    }
}

/// What `run` returns, and the events that it logs as text: the target, then each field.
pub(crate) fn logged<T>(hears: fn(&Metadata<'_>) -> bool, run: impl FnOnce() -> T) -> (T, Vec<String>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let seen = lines.clone();
    let listener = Listener::new(hears, move |event| {
        let mut text = Text(event.metadata().target().to_owned());
        event.record(&mut text);
        seen.lock().unwrap().push(text.0);
    });
    let result = tracing::subscriber::with_default(listener, run);
    let lines = std::mem::take(&mut *lines.lock().unwrap());
    (result, lines)
}

#[test]
fn documented_events_have_their_targets_and_fields() {
    let ((), events) = logged(
        |metadata| *metadata.level() <= Level::DEBUG,
        || {
            let device = aquifer_sim::open("256MiB,violations=panic").unwrap();
            let memory = Allocator::of_with(&device, "granule_mb:2").unwrap();
            let stream = device.stream().unwrap();
            let _reclaimer = memory.register_reclaimer(0, "cache", |_| 0);
            // Holes of 20 MiB; 120 MiB need memory from all of them.
            let mut blocks: Vec<_> = (0..12).map(|_| Some(memory.alloc::<u8>(20 << 20, &stream).unwrap())).collect();
            blocks.iter_mut().step_by(2).for_each(|block| *block = None);
            drop(memory.alloc::<u8>(100 << 20, &stream).unwrap());
            memory.alloc::<u8>(200 << 20, &stream).unwrap_err();
            assert_eq!(memory.stats().allocated_bytes.all.current, 120 * MIB);
        },
    );
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
