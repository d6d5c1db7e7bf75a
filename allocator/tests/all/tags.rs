//! Where the tags of allocations come from: scopes, tracing spans, or nowhere.

use aquifer_allocator::{Allocator, Config, TagScope};
use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};

/// The tags that the snapshot shows for one allocation made inside a scope and a span.
fn tag(options: &str) -> Option<String> {
    let device = Device::new(SimDriver::new(SimConfig::default()));
    let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
    let subscriber = tracing_subscriber::fmt().with_writer(std::io::sink).finish();
    let held = tracing::subscriber::with_default(subscriber, || {
        let _scope = TagScope::new("a scope");
        tracing::info_span!("attention").in_scope(|| allocator.alloc_bytes(5 << 20, device.default_stream()).unwrap())
    });
    let snapshot = serde_json::to_value(allocator.snapshot()).unwrap();
    drop(held);
    snapshot["segments"][0]["blocks"][0]["user_metadata"].as_str().map(str::to_owned)
}

#[test]
fn scopes_name_allocations_by_default() {
    assert_eq!(tag("").as_deref(), Some("a scope"));
    assert_eq!(tag("tags:scope").as_deref(), Some("a scope"));
}

#[test]
fn spans_name_allocations_where_asked_for() {
    assert_eq!(tag("tags:span").as_deref(), Some("attention"));
}

#[test]
fn tags_can_be_off() {
    assert_eq!(tag("tags:off"), None);
}
