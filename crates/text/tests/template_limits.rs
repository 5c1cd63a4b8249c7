//! What a hostile template may take: however it grows, it ends in an error that names the limit, before it has taken
//! more than some tens of MiB. Every allocation of this process goes through a counter, so there is one test.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use forebay_text::{ChatRequest, ChatTemplate};
use serde_json::json;

/// The most that one rendering may hold at once, beyond its request.
const MOST_BYTES: usize = 64 << 20;

struct Counting {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Counting {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Relaxed) + bytes;
        self.most.fetch_max(now, Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator as it came; the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's promises hold for the system's allocator too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.now.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above; `pointer` came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting { now: AtomicUsize::new(0), most: AtomicUsize::new(0) };

/// A loop that runs `body` a million times, with `ns.x` to begin with.
fn looped(begin: &str, body: &str) -> String {
    format!(
        "{{% set ns = namespace(x={begin}, y=0) %}}{{% for i in range(1000) %}}{{% for j in range(1000) %}}{body}{{% endfor %}}{{% endfor %}}{{{{ ns.y }}}}"
    )
}

fn set(begin: &str, value: &str) -> String {
    looped(begin, &format!("{{% set ns.x = {value} %}}"))
}

/// Templates that grow, each in another way.
fn hostile() -> Vec<String> {
    let mut out: Vec<String> = [
        ("'a'", "ns.x ~ ns.x"),
        ("'a'", "ns.x + ns.x"),
        ("'a'", "ns.x * 10"),
        ("'a'", "10 * ns.x"),
        ("[1]", "ns.x + ns.x"),
        ("[1]", "(ns.x + ns.x)|list"),
        ("[1]", "ns.x * 10"),
        ("'a'", "ns.x|replace('a', 'aaaa')"),
        ("'a'", "ns.x.replace('a', 'aaaa')"),
        ("'a'", "ns.x|replace('', ns.x)"),
        ("'a'", "[ns.x, ns.x]|join(ns.x)"),
        ("'a'", "ns.x.join([ns.x, ns.x])"),
        ("'a'", "ns.x.join('aaa')"),
        ("'a'", "(ns.x ~ '\n')|indent(1000, true)"),
        ("'a'", "'%s%s'|format(ns.x, ns.x)"),
        ("'a'", "'{0}{0}'.format(ns.x)"),
        ("'a'", "(ns.x ~ '\u{1}')|tojson|tojson"),
        ("[1]", "[ns.x, ns.x]"),
        ("[1]", "[ns.x, ns.x, ns.x|string]"),
        ("[1]", "{'a': ns.x, 'b': ns.x}"),
        ("[1]", "dict(a=ns.x, b=ns.x)"),
        ("[1]", "namespace(a=ns.x, b=ns.x)"),
        ("[1]", "[ns.x, range(100000)|list]"),
        ("[1]", "[ns.x, 'abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz' ~ j]"),
        ("[1]", "[ns.x, loop]"),
        ("[1]", "ns.x|batch(1)"),
        ("[1]", "ns.x|batch(1)|list"),
        ("[1]", "[ns.x]|list"),
        ("[1]", "ns.x[::-1]"),
        ("[1]", "ns.x[0:]"),
        ("[1, 2]", "ns.x|reverse"),
        ("['a']", "ns.x|map('batch', 2)|list"),
        ("['a']", "ns.x|map('replace', 'a', 'aaaa')|list"),
        ("['a']", "[ns.x|map('upper')|list, ns.x]"),
        ("[1]", "ns.x|zip(ns.x)|list"),
        ("[1]", "ns.x|chain(ns.x)|list"),
        ("[1]", "[ns.x, 'a b c d e f g h'.split(' ')]"),
        ("[1]", "[ns.x, 'a\nb\nc\nd'|lines]"),
        ("[1]", "[ns.x, {'a': 1, 'b': 2}.items()]"),
        ("[1]", "[ns.x, {'a': 1, 'b': 2}|dictsort]"),
        ("[1]", "[ns.x, [{'a': 1}]|groupby('a')]"),
    ]
    .iter()
    .map(|(begin, value)| set(begin, value))
    .collect();
    out.extend(
        [
            "{{ 'a' * 1000000000 }}",
            "{{ 'aaaaaaaaaa' * 100000000 }}",
            "{% set x = 'a' * 100000000 ~ 'a' * 100000000 %}{{ x|length }}",
            "{{ ([1] * 1000000000)|length }}",
            "{{ [1]|slice(1000000000) }}",
            "{{ [1]|batch(1000000000, 0) }}",
            "{{ 'a\nb'|indent(1000000000) }}",
            "{{ '%1000000000s'|format('a') }}",
            "{{ '%*s'|format(1000000000, 'a') }}",
            "{{ '{:1000000000}'.format('a') }}",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('aaaaaaaa') }}",
        ]
        .map(str::to_owned),
    );
    let raw = "x".repeat(1000);
    out.push(looped("0", &raw));
    out.push(format!("{{% set x %}}{}{{% endset %}}{{{{ x|length }}}}", looped("0", &raw)));
    out.push(format!("{{% filter upper %}}{}{{% endfilter %}}", looped("0", &raw)));
    out.push(format!("{{% macro m() %}}{}{{% endmacro %}}{{{{ m()|length }}}}", looped("0", &raw)));
    out.push(looped("[1]", "{% macro m() %}{{ ns.x }}{% endmacro %}{% set ns.x = [m, ns.x] %}"));
    out.push(looped(
        "'a'",
        "{% for c in 'abcdefghij' * 10000 %}{% set ns.y = [ns.y, loop] %}{% endfor %}",
    ));
    // Shared values: small in memory, endless when they are written or compared.
    let shared = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    for end in [
        "{{ ns.x }}",
        "{{ ns.x|string }}",
        "{{ ns.x|tojson }}",
        "{{ ns.x|tojson(indent=60) }}",
        "{{ ns.x|pprint }}",
        "{{ ns.x ~ 'a' }}",
        "{{ ns.x == ns.y }}",
        "{{ ns.x is eq(ns.y) }}",
        "{{ [ns.x, ns.y]|sort }}",
        "{{ [ns.x, ns.y]|unique|list }}",
        "{{ ns.x in [ns.y] }}",
        "{{ raise_exception(ns.x) }}",
    ] {
        out.push(format!("{shared}{end}"));
    }
    out.push("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_owned());
    out
}

#[test]
fn hostile_templates_end_in_an_error() {
    let request = ChatRequest {
        messages: vec![json!({"role": "user", "content": "Hi"})],
        ..ChatRequest::default()
    };
    let mut wrong = Vec::new();
    let mut worst = (0, String::new());
    for source in hostile() {
        let before = COUNTING.now.load(Relaxed);
        COUNTING.most.store(before, Relaxed);
        let started = std::time::Instant::now();
        let result = ChatTemplate::new(&source).and_then(|template| template.render(&request));
        let taken = COUNTING.most.load(Relaxed) - before;
        let shown: String = source.chars().take(200).collect();
        println!(
            "{:6.1} MiB {:6.2} s {shown}",
            taken as f64 / 1048576.0,
            started.elapsed().as_secs_f64()
        );
        match result {
            Ok(text) => wrong.push(format!("{shown}: {} bytes", text.len())),
            Err(error) if error.class() != "LimitExceeded" => {
                wrong.push(format!("{shown}: {error}"))
            }
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains("`default`") && !message.contains('\n'), "{message}");
            }
        }
        if taken > MOST_BYTES {
            wrong.push(format!("{shown}: {taken} bytes"));
        }
        if taken > worst.0 {
            worst = (taken, shown);
        }
    }
    println!("most: {} bytes, {}", worst.0, worst.1);
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}
