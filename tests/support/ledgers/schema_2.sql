BEGIN TRANSACTION;
CREATE TABLE attempts (
	point VARCHAR(32) NOT NULL,
	number INTEGER NOT NULL,
	epoch INTEGER NOT NULL,
	started_at FLOAT NOT NULL,
	ended_at FLOAT,
	outcome VARCHAR(32),
	detail TEXT,
	engines TEXT NOT NULL,
	PRIMARY KEY (point, number),
	FOREIGN KEY(point) REFERENCES points (id)
);
INSERT INTO "attempts" VALUES('p1',1,7,3.0,9.0,'done',NULL,'[]');
CREATE TABLE commands (
	seq INTEGER NOT NULL,
	kind VARCHAR(32) NOT NULL,
	target VARCHAR(128) NOT NULL,
	detail TEXT,
	created_at FLOAT NOT NULL,
	done_at FLOAT,
	PRIMARY KEY (seq)
);
INSERT INTO "commands" VALUES(1,'cancel','p2',NULL,5.0,NULL);
CREATE TABLE drains (
	id VARCHAR(36) NOT NULL,
	run VARCHAR(128) NOT NULL,
	planned TEXT NOT NULL,
	on_timeout VARCHAR(16) NOT NULL,
	started_at FLOAT NOT NULL,
	deadline FLOAT NOT NULL,
	aborted_at FLOAT,
	ended_at FLOAT,
	receipt TEXT,
	PRIMARY KEY (id)
);
INSERT INTO "drains" VALUES('d1','r1','[]','leave',5.0,99.0,NULL,NULL,NULL);
CREATE TABLE meta (
	"key" VARCHAR(64) NOT NULL,
	value TEXT NOT NULL,
	at FLOAT NOT NULL,
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema_version','2',1.0);
INSERT INTO "meta" VALUES('epoch','7',1.0);
CREATE TABLE points (
	id VARCHAR(32) NOT NULL,
	seq INTEGER NOT NULL,
	run VARCHAR(128) NOT NULL,
	step INTEGER NOT NULL,
	suite VARCHAR(64) NOT NULL,
	reservation VARCHAR(36) NOT NULL,
	kind VARCHAR(16) NOT NULL,
	force BOOLEAN NOT NULL,
	priority INTEGER,
	source VARCHAR(16) NOT NULL,
	state VARCHAR(16) NOT NULL,
	reason VARCHAR(32),
	detail TEXT,
	superseded BOOLEAN NOT NULL,
	snapshot_id VARCHAR(32),
	attempts INTEGER NOT NULL,
	faults INTEGER NOT NULL,
	weight_version VARCHAR(64),
	pin_proof VARCHAR(16),
	score FLOAT,
	stderr FLOAT,
	metrics TEXT NOT NULL,
	samples_path TEXT,
	lag_steps INTEGER,
	timings TEXT NOT NULL,
	created_at FLOAT NOT NULL,
	queued_at FLOAT,
	started_at FLOAT,
	ended_at FLOAT,
	PRIMARY KEY (id),
	UNIQUE (reservation, suite),
	UNIQUE (seq),
	FOREIGN KEY(run) REFERENCES runs (run),
	FOREIGN KEY(snapshot_id) REFERENCES snapshots (id)
);
INSERT INTO "points" VALUES('p1',1,'r1',10,'main','u1','periodic',0,3,'staging','done',NULL,NULL,0,'s1',1,0,'w1','canary',0.75,0.1,'{"exact": {"value": 0.75, "stderr": 0.1, "n": 4}}','/roots/r1/s.parquet',2,'{}',2.0,2.0,3.0,9.0);
INSERT INTO "points" VALUES('p2',2,'r1',20,'main','u2','periodic',0,3,'staging','reserved',NULL,NULL,0,NULL,0,0,NULL,NULL,NULL,NULL,'{}',NULL,NULL,'{}',4.0,NULL,NULL,NULL);
CREATE TABLE runs (
	run VARCHAR(128) NOT NULL,
	spec TEXT NOT NULL,
	state VARCHAR(16) NOT NULL,
	paused BOOLEAN NOT NULL,
	resumed_at FLOAT,
	step INTEGER,
	progress_at FLOAT,
	created_at FLOAT NOT NULL,
	deleted_at FLOAT,
	PRIMARY KEY (run)
);
INSERT INTO "runs" VALUES('r1','{"root": "/roots/r1", "suites": ["main"], "max_in_flight": 2}','active',0,NULL,20,NULL,1.0,NULL);
CREATE TABLE snapshots (
	id VARCHAR(32) NOT NULL,
	run VARCHAR(128) NOT NULL,
	step INTEGER NOT NULL,
	path TEXT NOT NULL,
	source VARCHAR(16) NOT NULL,
	claimed_digest VARCHAR(32),
	digest VARCHAR(32),
	tensor_digest VARCHAR(32),
	nonce VARCHAR(32),
	manifest TEXT,
	vocab_size INTEGER,
	admitted_at FLOAT,
	created_at FLOAT NOT NULL,
	settled_at FLOAT,
	deleting_at FLOAT,
	deleted_at FLOAT,
	held BOOLEAN NOT NULL,
	PRIMARY KEY (id),
	UNIQUE (run, step, path),
	FOREIGN KEY(run) REFERENCES runs (run)
);
INSERT INTO "snapshots" VALUES('s1','r1',10,'/roots/r1/step_10-a','staging',NULL,'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',NULL,'n',NULL,NULL,3.0,2.0,9.0,NULL,NULL,0);
CREATE INDEX commands_open ON commands (done_at);
CREATE INDEX points_by_state ON points (state);
CREATE INDEX points_by_snapshot ON points (snapshot_id);
CREATE INDEX points_by_run ON points (run, step, suite);
COMMIT;
